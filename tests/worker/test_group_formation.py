"""Processes that were all at the roll-call, and then torch makes no process group: who does not
answer, or is not reached, is named.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import finish, free_port, script, start
from namespaces import machines, why_not
from procs import WITH_TORCH, Job

pytestmark = pytest.mark.slow

NewJob = Callable[..., Job]
HOST = socket.gethostname()
# Rank 1 does something else as soon as it is in torch's hands.
INIT = """
    import os, pathlib, signal, time
    import torch.distributed as dist
    from clusterjob import bootstrap

    make = dist.init_process_group
    def faulty(*args, **kwargs):
        if os.environ["RANK"] == "1":
            pathlib.Path("pid1").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return make(*args, **kwargs)
    dist.init_process_group = faulty
    with bootstrap.init(timeout=9) as ctx:
        print("met", ctx.rank, flush=True)
"""


def place(
    rank: int, address: str, port: int, local_rank: int, local_world_size: int
) -> dict[str, str]:
    """Return the variables of one of three processes."""
    return {
        "RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size), "MASTER_ADDR": address, "MASTER_PORT": str(port),
    }  # fmt: skip


def last(err: str) -> str:
    return [line for line in err.strip().splitlines() if not line.startswith("hint: ")][-1]


def test_one_that_stops_in_the_making_is_named_and_blamed(new_job: NewJob) -> None:
    job = new_job(2)
    job.start_all("--nproc-per-node", "2", job.script(INIT), python=WITH_TORCH)
    assert job.wait() == [1, 1]
    pid = job.path("pid1").read_text()
    words = f"waiting for rank 1 on {HOST} (pid {pid}): at the roll-call, and no answer while the process group is made: died, or stuck; "
    errs = [job.log(rank // 2, f"rank{rank}.err") for rank in (0, 2, 3)]
    said = [
        line
        for err in errs
        for line in err.splitlines()
        if line.startswith(f"clusterjob: {words}") and line.endswith("s so far")
    ]
    assert len(said) == 1, errs  # one speaks
    assert all(f"GangError: {words}gave up after " in last(err) for err in errs), errs
    assert (
        job.result["failure"]["rank"],
        sorted(each["rank"] for each in job.result["consequences"]),
    ) == (1, [0, 2, 3])
    assert "it is stopped" in job.result["reason"]


def test_without_an_agent_too(tmp_path: Path) -> None:
    port, path = free_port(), script(tmp_path, INIT)
    first, stopped, third = (
        start([sys.executable, path], tmp_path, place(rank, "127.0.0.1", port, rank, 3))
        for rank in range(3)
    )
    try:
        ended = [finish(first), finish(third)]
    finally:
        stopped.send_signal(signal.SIGKILL)
        finish(stopped)
    words = f"waiting for rank 1 on {HOST} (pid {stopped.pid}): at the roll-call, and no answer while the process group is made"
    assert sum(each.err.count(f"clusterjob: {words}") for each in ended) == 1, ended
    assert f"GangError: {words}: died, or stuck; gave up after " in last(ended[0].err)


def test_machines_that_do_not_reach_each_other_are_named(tmp_path: Path) -> None:
    """Both reach rank 0, and so they meet; what one sends to the other is lost, as in a firewall."""
    if why_not():
        pytest.skip(why_not())
    text = INIT.replace('os.environ["RANK"] == "1"', "False").replace(
        "flush=True)", "flush=True); time.sleep(12 if ctx.rank == 0 else 0)"
    )
    with machines(3) as three:
        for one, other in ((three[1], three[2]), (three[2], three[1])):
            swallow = [
                "ip",
                "neigh",
                "replace",
                other.address,
                "lladdr",
                "02:00:00:00:00:09",
                "dev",
                "eth0",
                "nud",
                "permanent",
            ]
            assert (
                subprocess.run(one.command(*swallow), capture_output=True, check=False).returncode
                == 0
            )
        path = script(tmp_path, text)
        each = [
            start(
                machine.command(sys.executable, path),
                tmp_path,
                place(rank, three[0].address, 29500, 0, 1),
            )
            for rank, machine in enumerate(three)
        ]
        ended = [finish(process) for process in each]
    assert [process.code for process in ended] == [0, 1, 1], ended
    said = [
        line
        for process in ended
        for line in process.err.splitlines()
        if line.startswith("clusterjob: the process group is not made after")
    ]
    assert len(said) == 1, ended
    pids = [process.pid for process in each]
    assert (
        f"2 of 3 processes wait for each other, such as rank 1 on {HOST} (pid {pids[1]}) and rank 2 on {HOST} (pid {pids[2]}): "
        in said[0]
    )
    assert "can their machines reach each other" in said[0]
