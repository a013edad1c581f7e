"""Rendezvous of ranks without an agent: missing, duplicate and foreign ranks are named."""

from __future__ import annotations

import contextlib
import itertools
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launching import (
    HOST,
    MARGIN,
    TEST_TIMEOUT,
    finish,
    free_port,
    last_message,
    rank_variables,
    run,
    script,
    start,
    timeout_seconds,
    waited_seconds,
)
from namespaces import Machine, machines, skip_reason
from preloaded import ForkedProgram, Preloaded
from procs import wait_until

from clusterjob.errors import RanksMissingError
from clusterjob.worker.rendezvous import Facts, disagreement, join, polls

INIT = """
    import os, time
    if gate := os.environ.get("GATE"):  # the slow import is done before the gate opens
        import torch.distributed
        open(f"{gate}{os.environ['RANK']}", "w").close()
        while not os.path.exists(gate):
            time.sleep(0.01)
    from clusterjob import bootstrap
    with bootstrap.init(timeout=TIMEOUT) as ctx:
        print("met", ctx.rank, flush=True)
"""


Processes = Callable[[float, list[dict[str, str]]], list[ForkedProgram]]


@pytest.fixture
def processes(preloaded: Preloaded, tmp_path: Path) -> Processes:
    """Return a function that starts `INIT` with a timeout, once per set of variables."""

    def start_all(timeout: float, variables: list[dict[str, str]]) -> list[ForkedProgram]:
        path = script(tmp_path, INIT.replace("TIMEOUT", str(timeout)))
        return [preloaded.start([path], tmp_path, each) for each in variables]

    return start_all


def open_gate(directory: Path, gate: str, *ranks: int) -> None:
    """Wait until all ranks are at the gate, then open it."""
    wait_until(
        lambda: all((directory / f"{gate}{rank}").exists() for rank in ranks),
        TEST_TIMEOUT,
        f"ranks {ranks} at {gate}",
    )
    (directory / gate).touch()


def test_waiting_ranks_report_missing_rank(tmp_path: Path, processes: Processes) -> None:
    port = free_port()
    first, third = processes(
        7, [rank_variables(rank, 3, port) | {"GATE": "gate"} for rank in (0, 2)]
    )
    open_gate(tmp_path, "gate", 0, 2)
    ended = [finish(first), finish(third)]
    notices = [
        line for each in ended for line in each.err.splitlines() if line.startswith("clusterjob: ")
    ]
    assert len(notices) == 1, ended  # one line per job, not per rank
    assert notices[0].startswith(
        f"clusterjob: waiting for rank 1 (node 0, {HOST}): "
        "not seen yet: not started, or still importing; "
    )
    # seconds since the rank that prints has joined
    assert 4 <= waited_seconds(notices[0]) <= 4 + MARGIN
    assert [each.code for each in ended] == [1, 1]
    for each in ended:
        assert "RanksMissingError: waiting for rank 1" in last_message(each.err)
        assert 7 <= timeout_seconds(last_message(each.err)) <= 7 + MARGIN
        assert "socket.cpp" not in each.err  # torch's own wait prints it at each timeout


def test_port_in_use_error_is_one_line(tmp_path: Path, processes: Processes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        [process] = processes(60, [rank_variables(0, 2, port)])
        ended = finish(process)
    assert ended.code == 1
    assert last_message(ended.err).endswith(
        f"(pid {process.pid}) cannot listen at 127.0.0.1:{port}: Address already in use"
    )
    assert "TCPStore" not in ended.err
    if sys.version_info >= (3, 11):  # a traceback shows notes
        assert ended.err.splitlines()[-1] == "hint: set MASTER_PORT to another port"


@pytest.mark.parametrize("rank", [0, 1])
def test_unresolvable_master_addr_error_is_one_line_within_60_s(
    tmp_path: Path, processes: Processes, rank: int
) -> None:
    begin = time.monotonic()
    [process] = processes(
        600, [rank_variables(rank, 2, 29500, 1) | {"MASTER_ADDR": "no-such-host.invalid"}]
    )
    ended = finish(process, code=1)
    assert "no-such-host.invalid:29500: " in last_message(ended.err)
    assert time.monotonic() - begin < 60  # torch's own timeout is 600 s


def test_unreachable_master_addr_error_is_one_line(tmp_path: Path) -> None:
    why = skip_reason()
    if why:
        pytest.skip(why)
    with machines(1) as [machine]:
        environ = rank_variables(1, 2, 29500, 1) | {"MASTER_ADDR": "198.51.100.7"}
        ended = run(
            machine.command(sys.executable, script(tmp_path, INIT.replace("TIMEOUT", "600"))),
            tmp_path,
            environ,
        )
    assert ended.code == 1
    assert (
        f"rank 1 on {HOST} cannot reach rank 0 at 198.51.100.7:29500: Network is unreachable; "
        "gave up after" in last_message(ended.err)
    )


@contextlib.contextmanager
def machine_with_packet_loss() -> Iterator[Machine]:
    """Create a machine whose packets to 10.77.0.9 are lost."""
    why = skip_reason()
    if why:
        pytest.skip(why)
    with machines(1) as [machine]:
        lost = "ip neigh add 10.77.0.9 lladdr 02:00:00:00:00:09 dev eth0 nud permanent"
        subprocess.run(machine.command(*lost.split()), capture_output=True, check=True)
        yield machine


@pytest.mark.slow
def test_rank_and_agent_report_master_addr_without_answer(tmp_path: Path) -> None:
    path = script(tmp_path, INIT.replace("TIMEOUT", "7"))
    node = {
        "CLUSTERJOB_NNODES": "2", "CLUSTERJOB_NODE_RANK": "1", "CLUSTERJOB_NPROC_PER_NODE": "1",
        "CLUSTERJOB_MASTER_ADDR": "10.77.0.9", "CLUSTERJOB_TOKEN": "secret-of-the-job",
    }  # fmt: skip
    launch = ["-m", "clusterjob", "launch", "--join-timeout", "6"]
    with machine_with_packet_loss() as machine:
        environ = rank_variables(1, 2, 29500, 1) | {"MASTER_ADDR": "10.77.0.9"}
        rank = start(machine.command(sys.executable, path), tmp_path, environ)
        agent = start(machine.command(sys.executable, *launch, path), tmp_path, node)
        ended = [finish(rank), finish(agent)]
    texts = (
        f"rank 1 on {HOST} cannot reach rank 0 at 10.77.0.9:29500: timed out",
        "node 1 cannot reach node 0 at 10.77.0.9: no answer (port",
    )
    for each, text in zip(ended, texts, strict=True):
        assert each.code == 1
        first, *_, last = [line for line in each.err.splitlines() if text in line]
        assert 2 <= waited_seconds(first) <= 4 + MARGIN, each.err
        assert "gave up after" in last


def test_rank_1_waits_for_late_rank_0(tmp_path: Path, processes: Processes) -> None:
    port = free_port()
    [second] = processes(90, [rank_variables(1, 2, port) | {"LOCAL_RANK": "0"}])
    line = second.stderr.readline()
    assert line.startswith(
        f"clusterjob: rank 1 on {HOST} cannot reach rank 0 at 127.0.0.1:{port}: "
        "Connection refused; "
    )
    [first] = processes(90, [rank_variables(0, 2, port)])
    assert [finish(first).code, finish(second).code] == [0, 0]


SLOW_RANK_1 = """
    import os, sys, time
    import torch.distributed as dist

    real = dist.init_process_group
    def slow(**options):
        real(**options)
        time.sleep(1)
        options["store"].set("still", "there")  # other backends of torch use the store now
        options["store"].get("still")
    if os.environ["RANK"] == "1":
        dist.init_process_group = slow
    from clusterjob import bootstrap
    bootstrap.init(timeout=60)
"""


def test_rank_0_serves_store_until_each_rank_has_process_group(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    port = free_port()
    path = script(tmp_path, SLOW_RANK_1)
    ended = [
        finish(process)
        for process in [
            preloaded.start([path], tmp_path, rank_variables(rank, 2, port)) for rank in (0, 1)
        ]
    ]
    assert [each.code for each in ended] == [0, 0], ended


def test_notices_come_after_4_s_and_then_every_30_s(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 0.5)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    waits = itertools.islice(polls(1.0), 150)
    assert [each for each in waits if each[1]] == [(4.5, 1), (34.5, 2), (64.5, 3)]


FIRST = Facts(
    1,
    "h0",
    pid=1,
    world_size=4,
    job="job",
    versions="torch 2.13.0 with NCCL 2.27.3",
    gpu="GPU-0",
)
OWN = replace(FIRST, rank=3, host="h1", pid=4, gpu="GPU-3")


def test_rank_whose_store_ends_blames_other_ranks() -> None:
    class Ended:
        def offer(self, *_: object) -> str:
            raise RuntimeError("Connection reset by peer\nException raised from recvBytes")

    store: Any = Ended()
    with pytest.raises(RanksMissingError) as failed:
        join(store, OWN, timeout=1)
    assert str(failed.value) == (
        "rank 3 on h1 (pid 4) has joined, and the store of the rendezvous has ended: "
        "Connection reset by peer"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"world_size": 8},
            "rank 3 on h1 (pid 4) counts 8 processes, rank 1 on h0 (pid 1) counts 4 processes",
        ),
        (
            {"job": ""},
            "rank 3 on h1 (pid 4) is of job (unnamed), rank 1 on h0 (pid 1) is of job job",
        ),
        (
            {"versions": "torch 2.12.0"},
            (
                "rank 3 on h1 (pid 4) has torch 2.12.0, "
                "rank 1 on h0 (pid 1) has torch 2.13.0 with NCCL 2.27.3"
            ),
        ),
        (
            {"gpu": "GPU-0"},
            "rank 3 on h1 (pid 4) and rank 1 on h0 (pid 1) have the same GPU, GPU-0",
        ),
        ({"rank": 1}, "rank 1 is claimed twice: by h0 (pid 1) and by h1 (pid 4)"),
    ],
)
def test_disagreement_names_both_processes_and_difference(
    change: dict[str, Any], message: str
) -> None:
    assert disagreement(OWN, FIRST) == ("", "")
    own = replace(OWN, **change)
    refused, hint = disagreement(own, FIRST)
    assert refused == message
    assert hint
    assert disagreement(FIRST, own) == (refused, hint)


# Ranks in threads of one process, each with its own store client. Rank 0 never joins, but the store
# exists, as if an agent serves it.
WITHOUT_RANK_0 = """
    import sys, threading, time
    from dataclasses import replace
    from datetime import timedelta
    import torch.distributed as dist
    from clusterjob.worker import rendezvous
    from clusterjob.worker.rendezvous import GroupStore
    from clusterjob.errors import RendezvousError
    from clusterjob.node.system import network
    from clusterjob.node.environments.topology import Topology, Worker

    FAULT, TIMEOUT = eval(sys.argv[1]), float(sys.argv[2])
    listener = network.listen_at("127.0.0.1", 0, 64)
    port = listener.getsockname()[1]
    served = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False,
        master_listen_fd=listener.detach())

    def join(rank):
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        worker = Worker(Topology(2, 0, 2, "127.0.0.1", port, "clusterjob"), rank, rank % 2, 4, 2)
        facts = rendezvous.Facts(
            rank, f"h{rank // 2}", rank, 4, "job", "torch 2", f"GPU-{rank}")
        if rank == 3:
            facts = replace(facts, **FAULT)
        try:
            rendezvous.join(GroupStore(store, worker, served=True, number=0), facts, TIMEOUT)
        except RendezvousError as error:
            sys.stdout.write(f"{rank} {error}\\n")  # one write per line: the threads share stdout
            sys.stdout.flush()

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("dict(versions='torch 1')", "rank 3 on h1 (pid 3) has torch 1, rank "),
        ("dict(gpu='GPU-1')", "have the same GPU, GPU-1"),
        ("dict(gpu='GPU-2')", "have the same GPU, GPU-2"),
        ("dict(rank=2)", "rank 2 is claimed twice: by h1 (pid "),
        ("dict(job='yours')", "rank 3 on h1 (pid 3) is of job yours, rank "),
    ],
)
def test_disagreement_ends_wait_for_rank_0(
    tmp_path: Path, preloaded: Preloaded, fault: str, message: str
) -> None:
    ended = preloaded.run([script(tmp_path, WITHOUT_RANK_0), fault, "600"], tmp_path)
    lines = sorted(ended.out.splitlines())
    assert [line[0] for line in lines] == ["1", "2", "3"], ended
    assert all(message in line for line in lines)


SIMULATED = """
    import resource, sys, threading, time
    from datetime import timedelta
    import torch.distributed as dist
    from clusterjob.worker import rendezvous
    from clusterjob.worker.rendezvous import GroupStore
    from clusterjob.node.system import network
    from clusterjob.node.environments.topology import Topology, Worker

    WORLD, EACH, WAIT = int(sys.argv[1]), 8, timedelta(seconds=90)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    listener = network.listen_at("127.0.0.1", 0, 4096)
    port = listener.getsockname()[1]
    stores = [dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=WAIT,
        master_listen_fd=listener.detach())]
    stores += [
        dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=WAIT)
        for _ in range(WORLD - 1)]
    joined = [False] * WORLD

    def answer(rank):
        host = rank % (WORLD // EACH)  # cyclic distribution of ranks
        topology = Topology(WORLD // EACH, 0, EACH, "127.0.0.1", port, "openmpi")
        worker = Worker(topology, rank, 0, WORLD, EACH)
        facts = rendezvous.Facts(rank, f"h{host}", rank, WORLD, "job", "torch", "")
        store = GroupStore(stores[rank], worker, served=False, number=0)
        rendezvous.join(store, facts, 90)
        joined[rank] = True

    threads = [threading.Thread(target=answer, args=(rank,)) for rank in range(WORLD)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(joined)
    print(time.monotonic() - begin)
"""


@pytest.mark.parametrize(
    ("world", "seconds"), [(32, 2.0), pytest.param(1024, 25.0, marks=pytest.mark.slow)]
)
def test_rendezvous_of_many_ranks_is_fast(
    tmp_path: Path, preloaded: Preloaded, world: int, seconds: float
) -> None:
    """1,024 ranks take 1.2 s on two cores; torch needs 100 s for their connections before."""
    ran = preloaded.run([script(tmp_path, SIMULATED), world], tmp_path, code=0)
    assert float(ran.out) < seconds


JOINS_AGAIN = """
    import torch.distributed as dist
    from clusterjob.worker import rendezvous
    from clusterjob.worker.rendezvous import GroupStore
    from clusterjob.node.environments.topology import Topology, Worker
    store = dist.HashStore()
    def enter(rank):
        worker = Worker(Topology(1, 0, 2, "127.0.0.1", 1, "env"), rank, rank, 2, 2)
        group = GroupStore(store, worker, served=False, number=0)
        rendezvous._enter(group, rendezvous.Facts(rank, "h", rank, 2, "job", "torch", ""))
        return group.has("go")
    print(enter(0), enter(0), enter(1))
"""


def test_process_that_joins_again_is_counted_once(tmp_path: Path, preloaded: Preloaded) -> None:
    ran = preloaded.run([script(tmp_path, JOINS_AGAIN)], tmp_path)
    assert ran.out.split() == ["False", "False", "True"], ran.err
