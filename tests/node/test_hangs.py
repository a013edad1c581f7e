"""`--hang-timeout` with real jobs: each kind of hang is found, and busy jobs are left alone."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hanging_fuse
import pytest
from launching import new_folder
from procs import PLAIN, TEST_TIMEOUT, WITH_TORCH, Job, MakeJob

TIMEOUT = 5.0  # seconds of --hang-timeout
LATE = 10.0  # seconds after the timeout within which a hang must be found
BUSY = 15.0  # seconds that a slow machine may add to it

# Rank 1 hangs; the others wait for it.
FAULTS = """
    import ctypes, os, signal, sys, threading, time

    def note():
        with open(f"{sys.argv[1]}.at", "w") as file:
            file.write(str(time.monotonic()))

    def ready():
        return False

    def decode():
        while not ready():
            pass

    def lock():
        once = threading.Lock()
        once.acquire()
        once.acquire()

    def read():
        with open(os.environ["HANGING_FILE"], "rb", buffering=0) as file:
            file.read(10)

    def join():
        # ~ProcessGroupGloo of torch 2.13 does the same: it blocks with the interpreter's lock,
        # which another thread needs.
        threading.Thread(target=time.sleep, args=(0.5,), daemon=True).start()
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)

    def mismatch():
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        values = torch.ones(4)
        dist.all_reduce(values)
        if dist.get_rank() == 1:
            note()
            dist.broadcast(values, src=2)
        else:
            dist.all_reduce(values)

    def watch():
        # What a metrics logger does beside a training loop.
        while True:
            with open("/proc/self/io") as file:
                file.read()
            time.sleep(1)

    fault = sys.argv[1]
    print("begin", flush=True)
    threading.Thread(target=watch, daemon=True).start()
    if fault == "mismatch":
        mismatch()
    if os.environ["RANK"] != "1":
        threading.Event().wait()
    note()
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    globals()[fault]()
"""
NAMES = ("stop", "lock", "mismatch", "decode", "join", "read")


def start(job: Job, script: str, *arguments: str, **variables: str) -> None:
    # Nothing ends the worker in the hanging file system: the stop waits for the grace.
    flags = ("--nproc-per-node", "3", "--hang-timeout", str(TIMEOUT), "--grace", "3")
    python = WITH_TORCH if "mismatch" in arguments else PLAIN
    # Before the fixture that sets PYTHONPATH for each test.
    variables.setdefault("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    job.start(0, *flags, script, *arguments, python=python, env=variables)


def events(job: Job) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.dir / "events.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Job]]:
    """One job for each fault, all at once: they only wait."""
    names = [name for name in NAMES if name != "read" or hanging_fuse.can_mount()]
    directory = tmp_path_factory.mktemp("hangs")
    mount = new_folder(directory / "mount")
    jobs: dict[str, Job] = {}
    with hanging_fuse.mounted(mount) if "read" in names else nullcontext(mount) as file:
        try:
            for name in names:
                (directory / name).mkdir()
                jobs[name] = job = Job(directory / name)
                start(job, job.script(FAULTS), name, HANGING_FILE=str(file))
            for job in jobs.values():
                job.wait()
            yield jobs
        finally:
            for job in jobs.values():
                for agent in job.agents:
                    agent.kill()
                    agent.wait()


@pytest.mark.parametrize("name", NAMES)
def test_hang_is_found_with_rank_and_place(hanging: dict[str, Job], name: str) -> None:
    if name not in hanging:
        pytest.skip("needs root and /dev/fuse, to mount a file system that hangs")
    job = hanging[name]
    result = job.result
    assert result["state"] == "FAILED"
    failure = result["failure"]
    assert failure["kind"] == "hang"
    assert failure["rank"] == failure["local_rank"] == 1
    assert failure["message"].startswith("no progress for 5s: ranks 0, 2 ")
    line = {
        "stop": "is stopped",
        "lock": "rank 1 is in lock (script.py:",
        "mismatch": "rank 1 waits in broadcast",
        "decode": "(script.py:",
        "join": "rank 1 is in join (script.py:",
        "read": "rank 1 ",
    }[name]
    assert line in failure["message"]
    if name not in ("stop", "read"):  # the kernel alone knows where these are
        assert "script.py:" in failure["message"]
        assert any("script.py:" in each for each in failure["last_lines"])
    saved = next(each for each in events(job) if each["event"] == "evidence")
    began = float((job.directory / f"{name}.at").read_text())
    assert TIMEOUT - 1 < saved["monotonic"] - began < TIMEOUT + LATE + BUSY
    assert result["evidence"] == saved["path"] == "logs/node0/stacks.txt"
    assert result["evidence_ranks"] == 3
    text = (job.dir / result["evidence"]).read_text()
    assert "no progress for 5s" in text.splitlines()[0]
    data = json.loads((job.dir / "logs/node0/stacks.json").read_text())
    assert [each["rank"] for each in data["ranks"]] == [0, 1, 2]
    assert ": no progress for 5s: " in data["why"]
    assert {1} in [set(each["ranks"]) for each in data["groups"]]
    assert (job.dir / result["evidence"]).stat().st_mode & 0o777 == 0o600
    verdict = job.stderr(job.agents[0])
    assert "stacks of 3 ranks: logs/node0/stacks.txt" in verdict


def test_heartbeats_keep_a_silent_job_alive(make_job: MakeJob) -> None:
    job = make_job(1)
    script = job.script("""
        import time
        from clusterjob import bootstrap
        with bootstrap.init(process_group=False) as ctx:
            end = time.monotonic() + 8
            while time.monotonic() < end:
                ctx.heartbeat(step=7)
                time.sleep(0.1)
            if ctx.rank == 1:
                time.sleep(1000)
            while True:
                time.sleep(1)
    """)
    flags = ("--hang-timeout", "3", "--nproc-per-node", "2")
    begin = time.monotonic()
    job.run(*flags, script, python=WITH_TORCH, code=1)
    assert time.monotonic() - begin > 8
    message = job.result["failure"]["message"]
    assert message.startswith("no progress for 3s: ")
    assert "last step 7" in message


# -- no false alarm --------------------------------------------------------------------------------

# Rank 0 works silently for several times the timeout, and the others wait in a collective.
BUSY_PROGRAMS = {
    "compile": """
        source = "#include <map>\\n#include <regex>\\n#include <string>\\n" + "".join(
            f"template<int N> int f{i}(std::map<int, std::string>& m) "
            f"{{ std::regex r(\\"a{i}\\"); return m.size() + f{i}<N - 1>(m); }}"
            f"template<> int f{i}<0>(std::map<int, std::string>&) {{ return 0; }}"
            f"int g{i}(std::map<int, std::string>& m) {{ return f{i}<60>(m); }}"
            for i in range(6)
        )
        if rank == 0:
            pathlib.Path("big.cpp").write_text(source)
            while time.monotonic() < end:
                subprocess.run(["g++", "-O2", "-c", "big.cpp", "-o", "big.o"], check=True)
    """,
    "checkpoint": """
        class Disk:
            def __init__(self, file):
                self.file = file
            def write(self, data):
                time.sleep(0.3)
                return self.file.write(data)
            def flush(self):
                pass
        if rank == 0:
            state = {f"layer{i}": torch.zeros(500_000) for i in range(20)}
            while time.monotonic() < end:
                with open("checkpoint.pt", "wb", buffering=0) as file:
                    torch.save(state, Disk(file))
    """,
    "loader": """
        class Slow(torch.utils.data.Dataset):
            def __len__(self):
                return 1000
            def __getitem__(self, index):
                time.sleep(2.5)
                return torch.ones(4)
        for batch in torch.utils.data.DataLoader(Slow(), batch_size=1, num_workers=1):
            over = torch.tensor([float(time.monotonic() > end)])
            dist.all_reduce(over)
            if over.item():
                break
    """,
}
PRELUDE = """
    import pathlib, subprocess, sys, time
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    rank, end = dist.get_rank(), time.monotonic() + float(sys.argv[1])
"""
POSTLUDE = """
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", BUSY_PROGRAMS)
def test_busy_job_is_left_alone_in_20_runs(tmp_path: Path, name: str) -> None:
    if name == "compile" and shutil.which("g++") is None:
        pytest.skip("needs g++")

    def run(number: int) -> Job:
        (tmp_path / str(number)).mkdir()
        job = Job(tmp_path / str(number))
        text = PRELUDE + BUSY_PROGRAMS[name].replace("\n    ", "\n") + POSTLUDE
        job.start(
            0, "--nproc-per-node", "2", "--hang-timeout", str(TIMEOUT), job.script(text), "20",
            python=WITH_TORCH, env={"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        job.wait(10 * TEST_TIMEOUT)
        return job

    with ThreadPoolExecutor(4) as pool:
        jobs = list(pool.map(run, range(20)))
    assert [job.result["state"] for job in jobs] == ["SUCCEEDED"] * 20, [
        job.result["reason"] for job in jobs
    ]
