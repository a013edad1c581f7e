"""The roll-call of processes that no agent looks after: who is missing, twice there, or of something else, is named."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launching import environment, finish, free_port, run, script, start
from namespaces import machines, why_not

from clusterjob.rollcall import Facts, contradiction

INIT = "from clusterjob import bootstrap\nwith bootstrap.init(timeout=TIMEOUT) as ctx:\n    print('met', ctx.rank, flush=True)\n"
HOST = socket.gethostname()


def place(rank: int, world: int, port: int, local: int | None = None) -> dict[str, str]:
    size = {"LOCAL_WORLD_SIZE": str(world if local is None else local)}
    return size | {
        "RANK": str(rank), "LOCAL_RANK": str(rank % int(size["LOCAL_WORLD_SIZE"])), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip


def processes(directory: Path, timeout: float, places: list[dict[str, str]]) -> list[subprocess.Popen[str]]:
    path = script(directory, INIT.replace("TIMEOUT", str(timeout)))
    return [start([sys.executable, path], directory, each) for each in places]


def last(err: str) -> str:
    return err.strip().splitlines()[-1]


def test_whoever_is_missing_is_named_while_the_others_wait(tmp_path: Path) -> None:
    port = free_port()
    first, third = processes(tmp_path, 7, [place(0, 3, port), place(2, 3, port)])
    assert first.stderr is not None
    line = first.stderr.readline()
    assert line.startswith(f"clusterjob: waiting for rank 1 (node 0, {HOST}): not heard of: not started, or still importing; ")
    assert 4 <= float(line.split("; ")[1].split()[0]) <= 6  # of waiting, which begins when this rank is there itself
    ended = [finish(first), finish(third)]
    assert [each.code for each in ended] == [1, 1]
    for each in ended:
        assert "GangError: waiting for rank 1" in last(each.err)
        assert "gave up after 7 s" in last(each.err)


def test_two_processes_of_one_rank_are_both_named(tmp_path: Path) -> None:
    port = free_port()
    started = processes(tmp_path, 60, [place(1, 3, port), place(1, 3, port), place(0, 3, port)])
    ended = [finish(process) for process in started]
    assert [each.code for each in ended].count(1) >= 2  # the first of the two may still wait for rank 0's answer
    pids = {str(started[0].pid), str(started[1].pid)}
    refused = [last(each.err) for each in ended if "is claimed twice" in each.err]
    assert len(refused) >= 2
    for line in refused:
        assert "rank 1 is claimed twice: by" in line
        assert line.count(HOST) == 2
        assert all(f"(pid {pid})" in line for pid in pids)
    assert not any("met" in each.out for each in ended)


def test_two_jobs_at_one_port_do_not_become_one(tmp_path: Path) -> None:
    port = free_port()
    one, other = ({"CLUSTERJOB_JOB_ID": name} for name in ("mine", "yours"))
    ended = [finish(process) for process in processes(tmp_path, 60, [place(0, 2, port) | one, place(1, 2, port) | other])]
    for each in ended:
        assert each.code == 1
        assert "is of job yours, rank 0 on" in last(each.err)


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        [process] = processes(tmp_path, 60, [place(0, 2, port)])
        ended = finish(process)
    assert ended.code == 1
    assert last(ended.err).endswith(f"(pid {process.pid}) cannot listen at 127.0.0.1:{port}: Address already in use")
    assert "TCPStore" not in ended.err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_master_that_does_not_resolve_is_one_line_within_seconds(tmp_path: Path, rank: int) -> None:
    begin = time.monotonic()
    [process] = processes(tmp_path, 600, [place(rank, 2, 29500, 1) | {"MASTER_ADDR": "no-such-host.invalid"}])
    ended = finish(process)
    assert ended.code == 1
    assert "no-such-host.invalid:29500: " in last(ended.err)
    assert time.monotonic() - begin < 60  # 600 were allowed


def test_a_master_to_which_no_way_leads_is_one_line_within_seconds(tmp_path: Path) -> None:
    why = why_not()
    if why:
        pytest.skip(why)
    with machines(1) as [machine]:
        environ = place(1, 2, 29500, 1) | {"MASTER_ADDR": "198.51.100.7"}
        ended = run(machine.command(sys.executable, script(tmp_path, INIT.replace("TIMEOUT", "600"))), tmp_path, environ)
    assert ended.code == 1
    assert f"rank 1 on {HOST} cannot reach rank 0 at 198.51.100.7:29500: Network is unreachable; gave up after" in last(ended.err)


def test_a_rank_0_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    port = free_port()
    [second] = processes(tmp_path, 90, [place(1, 2, port) | {"LOCAL_RANK": "0"}])
    assert second.stderr is not None
    line = second.stderr.readline()
    assert line.startswith(f"clusterjob: rank 1 on {HOST} cannot reach rank 0 at 127.0.0.1:{port}: Connection refused; ")
    [first] = processes(tmp_path, 90, [place(0, 2, port)])
    assert [finish(first).code, finish(second).code] == [0, 0]


FACTS = Facts("h0", 1, "boot", 4, "job", "torch 2.13.0 with NCCL 2.27.3", "GPU-0")


def everybody() -> list[Facts]:
    return [replace(FACTS, host=f"h{rank // 2}", pid=rank + 1, gpu=f"GPU-{rank}") for rank in range(4)]


def test_processes_that_agree_are_one_job() -> None:
    assert contradiction(everybody(), FACTS) == ""
    assert contradiction([replace(each, gpu="") for each in everybody()], FACTS) == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"world_size": 8}, "rank 3 on h1 (pid 4) counts 8 processes, rank 0 on h0 (pid 1) counts 4"),
        ({"job": ""}, "rank 3 on h1 (pid 4) is of job (unnamed), rank 0 on h0 (pid 1) of job job"),
        ({"versions": "torch 2.12.0"}, "rank 3 on h1 (pid 4) has torch 2.12.0, rank 0 on h0 (pid 1) has torch 2.13.0 with NCCL 2.27.3"),
        ({"gpu": "GPU-2"}, "rank 3 on h1 (pid 4) and rank 2 on h1 (pid 3) have the same GPU, GPU-2"),
    ],
)
def test_whoever_does_not_belong_is_named(change: dict[str, Any], words: str) -> None:
    every = everybody()
    every[3] = replace(every[3], **change)
    assert contradiction(every, every[0]) == words


SIMULATED = """
    import sys, threading, time
    from datetime import timedelta
    import torch.distributed as dist
    from clusterjob import rollcall
    from clusterjob.node import network
    from clusterjob.node.topology import Topology, Worker

    WORLD, EACH, WAIT = int(sys.argv[1]), 8, timedelta(seconds=90)
    listener = network.listen_at("127.0.0.1", 0, 4096)
    port = listener.getsockname()[1]
    stores = [dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=WAIT, master_listen_fd=listener.detach())]
    stores += [dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=WAIT) for _ in range(WORLD - 1)]
    nodes = [None] * WORLD

    def answer(rank):
        host = rank % (WORLD // EACH)  # as under a cyclic distribution
        worker = Worker(Topology(WORLD // EACH, 0, EACH, "127.0.0.1", port, "openmpi"), rank, 0, WORLD, EACH)
        facts = rollcall.Facts(f"h{host}", rank, "boot", WORLD, "job", "torch", "")
        nodes[rank] = rollcall.call(dist.PrefixStore("roll", stores[rank]), worker, facts, 90, started=False).nodes[rank]

    threads = [threading.Thread(target=answer, args=(rank,)) for rank in range(WORLD)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert nodes == [rank % (WORLD // EACH) for rank in range(WORLD)], nodes
    print(time.monotonic() - begin)
"""


@pytest.mark.parametrize(("world", "seconds"), [(16, 2.0), (1024, 25.0)])
def test_many_ranks_are_called_in_a_moment(tmp_path: Path, world: int, seconds: float) -> None:
    """1.2 s for 1,024 on two cores; the bounds are several times what it takes."""
    path = script(tmp_path, SIMULATED)
    ran = subprocess.run(
        ["sh", "-c", 'ulimit -n 4096 && exec "$@"', "sh", sys.executable, str(path), str(world)],
        env=environment(tmp_path), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) < seconds
