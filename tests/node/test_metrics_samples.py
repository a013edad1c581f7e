"""Samples of real processes with a known load, and of jobs whose agents take them."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit, setrlimit
from types import SimpleNamespace

import pytest
from launching import free_port
from nvidia import FakeNvml
from procs import PLAIN, TEST_TIMEOUT, Job, wait_until
from prometheus_client.parser import text_string_to_metric_families

from clusterjob.insight import sample_files
from clusterjob.node.agent import node_workers
from clusterjob.node.agent.node_workers import NodeMetrics
from clusterjob.node.logs import log_files
from clusterjob.node.metrics import prometheus, sources
from clusterjob.node.metrics import samples as metrics_samples
from clusterjob.node.metrics.samples import Sample, WorkerSample
from clusterjob.node.metrics.sources import GpuReader, Machine, Workers

BURN = "import time\nend = time.monotonic() + 1000\nwhile time.monotonic() < end: pass"
SLEEP = "import time; time.sleep(1000)"
UP = "import sys; print(flush=True); "


class Measured(Workers):
    """Workers whose first sample counts from now, with their samples by rank."""

    def __init__(self, find: Callable[[], dict[int, int]]) -> None:
        super().__init__(find, time.monotonic())

    def sample(self, *_: object) -> dict[int, WorkerSample]:
        return {worker.rank: worker for worker in super().sample({})}


class Processes:
    """Processes of a test, by rank; each prints a line when it is ready."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, code: str) -> int:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        self.started.append(process)
        process.stdout.readline()
        return process.pid


@pytest.fixture
def running() -> Iterator[Processes]:
    made = Processes()
    yield made
    for process in made.started:
        process.kill()
        process.communicate()


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def test_worker_use_is_that_of_the_kernel(running: Processes, tmp_path: Path) -> None:
    file = tmp_path / "written"
    burner = running.start(f"{UP}\n{BURN}")
    holder = running.start(
        f"import time; data = bytearray(200 << 20); data[::4096] = b'x' * len(data[::4096]); {UP}"
        + SLEEP
    )
    writer = running.start(
        f"""
import os, time
with open({str(file)!r}, "wb") as stream:
    {UP}
    while True:
        stream.write(bytes(1 << 20)); stream.flush(); os.fsync(stream.fileno()); time.sleep(.05)
"""
    )
    workers = Measured(lambda: {burner: 0, holder: 1, writer: 2})
    workers.sample()
    before, begin, size = cpu_of(burner), time.monotonic(), file.stat().st_size
    time.sleep(1.0)
    found = workers.sample()
    seconds = time.monotonic() - begin
    assert found[0].cpu == pytest.approx(100 * (cpu_of(burner) - before) / seconds, abs=10)
    assert found[0].cpu > found[1].cpu  # on a busy machine the first one gets little
    assert 200 << 20 < found[1].rss < 240 << 20
    assert found[2].written == pytest.approx((file.stat().st_size - size) / seconds, rel=0.5)
    assert found[0].written < 1 << 20
    assert [worker.threads for worker in found.values()] == [1, 1, 1]


def test_processes_below_a_worker_count_also_after_their_parent_and_their_own_end(
    running: Processes,
) -> None:
    burn_1_s = "import time\nwhile time.process_time() < 1: pass"
    parent = running.start(
        f"""
import os, subprocess, sys, time
for _ in range(2):
    # The middle process ends, so that the last one belongs to init.
    subprocess.run([sys.executable, "-S", "-c", '''
import subprocess, sys
subprocess.Popen(
    [sys.executable, "-S", "-c", "import time; time.sleep(3)"], stdout=subprocess.DEVNULL
)
'''])
child = subprocess.Popen([sys.executable, "-S", "-c", {burn_1_s!r}])
{UP}
child.wait()
time.sleep(1000)
"""
    )
    workers = Measured(lambda: {parent: 5})
    total, at = 0.0, time.monotonic()
    end = at + TEST_TIMEOUT
    first = workers.sample()[5]
    while total < 0.9 and at < end:
        time.sleep(0.05)
        now = time.monotonic()
        total += workers.sample()[5].cpu / 100 * (now - at)
        at = now
    assert 0.9 <= total < 2.0, (total, first)


def test_restart_of_a_worker_begins_new_counts(running: Processes) -> None:
    old = running.start(f"{UP}\n{BURN}")
    now = {old: 0}
    workers = Measured(lambda: now)
    workers.sample()
    time.sleep(0.5)
    running.started[0].kill()
    running.started[0].wait()
    now = {running.start(UP + SLEEP): 0}
    time.sleep(0.5)
    assert 0 <= workers.sample()[0].cpu < 60


def test_driver_that_hangs_keeps_only_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    release, calls = threading.Event(), []

    class Driver:
        def __init__(self, environ: object) -> None: ...

        def read(self) -> int:
            calls.append(1)
            if len(calls) == 2:
                release.wait()
                raise OSError("the driver was unloaded")
            return len(calls)

    monkeypatch.setattr(sources, "Nvml", Driver)
    monkeypatch.setattr(sources, "_GPU_PAUSE", 0.01)
    reader = GpuReader({})
    wait_until(lambda: len(calls) == 2, 5.0)
    assert reader.state() == 1
    monkeypatch.setattr(sources, "_GPU_TIMEOUT", 0.0)
    assert reader.state() is None
    release.set()
    wait_until(lambda: all(each.name != "gpus" for each in threading.enumerate()), 5.0)


# -- the machine -----------------------------------------------------------------------------------


def tree(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


@pytest.mark.parametrize(
    ("files", "memory", "used"),
    [
        (  # version 2: the limit is that of the step's parent
            {
                "proc/self/cgroup": "0::/slurm/job_7/step_0\n",
                "sys/fs/cgroup/slurm/job_7/step_0/memory.max": "max\n",
                "sys/fs/cgroup/slurm/job_7/memory.max": str(8 << 30),
                "sys/fs/cgroup/slurm/job_7/memory.current": str(5 << 30),
                "sys/fs/cgroup/slurm/job_7/memory.stat": f"anon 7\ninactive_file {1 << 30}\n",
            },
            8 << 30,
            4 << 30,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/slurm/job_7\n0::/\n",
                "sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes": str(8 << 30),
                "sys/fs/cgroup/memory/slurm/job_7/memory.usage_in_bytes": str(5 << 30),
                "sys/fs/cgroup/memory/slurm/job_7/memory.stat": "total_inactive_file 0\n",
            },
            8 << 30,
            5 << 30,
        ),
        (
            {
                "proc/self/cgroup": "0::/user.slice\n",
                "sys/fs/cgroup/user.slice/memory.max": "max\n",
            },
            64 << 30,
            16 << 30,
        ),
        ({}, 64 << 30, 16 << 30),
    ],
)
def test_memory_is_that_of_the_control_group_with_a_limit(
    tmp_path: Path, files: dict[str, str], memory: int, used: int
) -> None:
    info = f"MemTotal:    {64 << 20} kB\nMemAvailable:  {48 << 20} kB\n"
    machine = Machine(tree(tmp_path, {"proc/meminfo": info, **files}))
    assert (machine.memory, machine.sample()["memory"]) == (memory, used)


BLOCK = ("nvme0n1", "nvme0c0n1", "dm-0", "loop0")


def test_network_and_disks_count_each_byte_once(tmp_path: Path) -> None:
    def counters(factor: int) -> dict[str, str]:
        n = 10**6 * factor
        network = {
            f"sys/class/net/{name}/statistics/{way}_bytes": str(value)
            for name in ("lo", "docker0", "eth0")
            for way, value in (("rx", n), ("tx", 2 * n))
        }
        disks = {f"sys/block/{name}/stat": f"1 0 {n} 0 1 0 {2 * n} 0 0 0 0" for name in BLOCK}
        ports = "sys/class/infiniband/mlx5_0/ports/1/counters"
        rdma = {f"{ports}/port_{way}_data": str(n) for way in ("rcv", "xmit")}
        return network | disks | rdma

    (tmp_path / "sys/class/net/eth0/device").mkdir(parents=True)
    tree(tmp_path, {"sys/block/nvme0c0n1/hidden": "1\n", "sys/block/nvme0n1/hidden": "0\n"})
    root = tree(tmp_path, counters(1))
    machine = Machine(root)
    machine._at -= 10.0
    tree(tmp_path, counters(2))
    found = machine.sample()
    assert found["received"] == pytest.approx(5e5, rel=0.05)  # 1 MB, and 4 MB by RDMA, in 10 s
    assert found["sent"] == pytest.approx(6e5, rel=0.05)
    assert found["read"] == pytest.approx(512e5, rel=0.05)
    assert found["written"] == pytest.approx(1024e5, rel=0.05)
    tree(tmp_path, counters(0))  # the counters of a device that was added again
    assert machine.sample()["received"] == 0


# -- jobs ------------------------------------------------------------------------------------------

WORKER = """
    import os, pathlib, time
    rank = int(os.environ["RANK"])
    pathlib.Path(f"up{rank}").touch()
    end = time.monotonic() + 1000
    while time.monotonic() < end and not pathlib.Path("end").exists():
        if rank == 0:
            sum(range(100_000))
        time.sleep(0.01)
"""


def samples(job: Job, node: int = 0) -> list[Sample]:
    return [sample for _, sample in sample_files.read(job.dir, node)]


def ranks_of(sample: Sample) -> set[int]:
    return {worker.rank for worker in sample.workers}


def wait_for_workers(job: Job, ranks: set[int], node: int = 0) -> Sample:
    return wait_until(
        lambda: next((one for one in samples(job, node) if ranks_of(one) == ranks), None), 40.0
    )


@pytest.mark.parametrize("start", ["fork", pytest.param("exec", marks=pytest.mark.slow)])
def test_agents_sample_their_own_workers(make_job: Callable[..., Job], start: str) -> None:
    job = make_job(2)
    job.start_all("--nproc-per-node", "2", "--start", start, job.script(WORKER), python=PLAIN)
    wait_for_workers(job, {2, 3}, node=1)
    sample = wait_for_workers(job, {0, 1})
    wait_until(  # on a busy machine the working rank gets little at first
        lambda: any(
            one.workers[0].cpu > one.workers[1].cpu + 5
            for one in samples(job)
            if ranks_of(one) == {0, 1}
        ),
        TEST_TIMEOUT,
    )
    job.path("end").touch()
    assert job.wait() == [0, 0]
    assert sample.quiet > 1
    for node in (0, 1):
        usage = job.node_end(node)["usage"]
        assert set(usage["ranks"]) == {str(2 * node), str(2 * node + 1)}
        assert 0 < usage["seconds"] <= usage["wall"] + 0.2
        assert usage["startup"] < usage["wall"]
        assert usage["memory_peak"] > 10 << 20
    facts, _ = sample_files.latest(job.dir, 0)
    assert (facts.node_rank, facts.attempt, facts.gpus) == (0, 0, ())
    assert 0 < sample.memory < facts.memory
    assert 0 < sample.cpu < 105 * facts.cores


def test_sample_without_workers_is_not_written(
    running: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the newest sample of an ended job would often show no rank."""
    for module, name in (
        (node_workers, "_METRICS_AFTER"),
        (node_workers, "_GPUS_FIRST"),
        (metrics_samples, "INTERVAL"),
    ):
        monkeypatch.setattr(module, name, 0.02)
    log_files.node_directory(tmp_path, 0).mkdir(parents=True)
    ranks = {running.start(UP + SLEEP): 0}
    node = SimpleNamespace(
        directory=tmp_path,
        identity=SimpleNamespace(attempt=0, job_id="x"),
        options=SimpleNamespace(metrics=True, metrics_port=0),
        topology=SimpleNamespace(node_rank=0),
    )
    report = SimpleNamespace(state=SimpleNamespace(round=0), alive_at=time.monotonic())
    workers = SimpleNamespace(waits=dict, report=report)
    monkeypatch.setattr(NodeMetrics, "_ranks", lambda _: dict(ranks))
    metrics = NodeMetrics(node, workers)  # type: ignore[arg-type]
    asyncio.run(metrics.start())

    def written() -> list[Sample]:
        return [sample for _, sample in sample_files.read(tmp_path, 0)]

    try:
        before = len(wait_until(written, TEST_TIMEOUT))
        ranks.clear()
        time.sleep(0.3)
        count = len(written())
        time.sleep(0.3)
        assert len(written()) == count
        ranks[running.start(UP + SLEEP)] = 1
        wait_until(lambda: len(written()) > count, TEST_TIMEOUT)
    finally:
        metrics.end()
    assert before <= count
    assert all(one.workers for one in written())


def fetch(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return answer.read().decode()


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\n\r\n", b"200"),
        (b"GET /metrics?x HTTP/1.1\r\nHost: localhost:80\r\n\r\n", b"200"),
        (b"GET /metrics HTTP/1.1\r\nhost:[::1]:1 \r\nA: b\r\n\r\n", b"200"),
        (b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"200"),
        (b"GET /metrics HTTP/1.1\r\nHost: evil.example:80\r\n\r\n", b"403"),
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"404"),
        (b"x\r\n\r\n", b"404"),
        (b"y" * 20_000 + b"\r\n\r\n", b""),
        (b"GET /metrics HTTP/1.1\r\n", b""),
    ],
)
def test_metrics_port_answers_requests_to_this_machine(request_text: bytes, status: bytes) -> None:
    async def answer() -> bytes:
        port = free_port()
        async with await prometheus.serve(port, lambda: "text"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_text)
            writer.write_eof()
            try:
                return await reader.read()
            except ConnectionError:
                return b""
            finally:
                writer.close()

    assert asyncio.run(answer())[9:12] == status


def test_metrics_port_is_served_again_after_descriptors_ran_out() -> None:
    async def answer() -> bytes:
        port, loop, limits = free_port(), asyncio.get_running_loop(), getrlimit(RLIMIT_NOFILE)
        loop.set_exception_handler(lambda *_: None)  # which logs that no descriptor is free
        async with await prometheus.serve(port, lambda: "text"):
            with socket.socket() as client:
                client.setblocking(False)
                setrlimit(RLIMIT_NOFILE, (3, limits[1]))
                try:
                    await loop.sock_connect(client, ("127.0.0.1", port))
                    await loop.sock_sendall(client, b"GET /metrics HTTP/1.1\r\n\r\n")
                    with pytest.raises(asyncio.TimeoutError):
                        await asyncio.wait_for(loop.sock_recv(client, 12), 0.3)
                finally:
                    setrlimit(RLIMIT_NOFILE, limits)
                return await asyncio.wait_for(loop.sock_recv(client, 12), TEST_TIMEOUT)

    assert asyncio.run(answer()) == b"HTTP/1.1 200"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc: apt install gcc")
def test_metrics_port_serves_prometheus_text_of_each_node(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    job = make_job(2)
    port = free_port(2)
    nvml = FakeNvml(tmp_path / "nvml")
    words = ("--metrics-port", str(port), "--nproc-per-node", "2", job.script(WORKER))
    job.start_all(*words, python=PLAIN, env=nvml.variables)

    def has_workers(number: int) -> bool:
        try:
            return "clusterjob_worker_threads{" in fetch(number)
        except OSError:
            return False

    wait_until(lambda: has_workers(port) and has_workers(port + 1), 40.0)
    texts = [fetch(port), fetch(port + 1)]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetch(port, "/")
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    wait_until(lambda: has_workers(port), 20.0)  # the idle clients are closed after 5 s
    for client in idle:
        client.close()
    job.path("end").touch()
    assert job.wait() == [0, 0]
    for node, text in enumerate(texts):
        families = {each.name: each for each in text_string_to_metric_families(text)}
        assert all(each.documentation and each.samples for each in families.values())
        ranks = families["clusterjob_worker_cpu_seconds"].samples
        assert {one.labels["rank"] for one in ranks} == {str(2 * node), str(2 * node + 1)}
        assert all(one.labels["job"] == job.id for one in ranks)
        (first, second) = families["clusterjob_gpu_utilization_ratio"].samples
        assert (first.value, second.labels["uuid"]) == (0.8, "GPU-0001-fake")
        assert families["clusterjob_gpu_ecc_uncorrected_errors"].type == "counter"
        assert families["clusterjob_info"].samples[0].labels["node"] == str(node)
        if promtool := shutil.which("promtool"):
            done = subprocess.run(
                [promtool, "check", "metrics"], input=text, capture_output=True, text=True,
                check=False,
            )  # fmt: skip
            assert (done.returncode, done.stderr) == (0, "")


def test_port_in_use_is_one_line_and_the_job_goes_on(make_job: Callable[..., Job]) -> None:
    job = make_job()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        job.run("--metrics-port", port, job.script("print('done')"), python=PLAIN)
    said = job.stderr(job.agents[0]) + job.stdout(job.agents[0])
    assert said.count(f"node 0 serves no metrics on port {port}: ") == 1
