"""Workers that do not join the rendezvous of ranks.

Agents report what these workers do. If other ranks time out, these workers are the root cause.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import pytest
from launching import MARGIN, waited_seconds
from procs import TEST_TIMEOUT, WITH_TORCH, Job, wait_until

from clusterjob.node.stacks.offer import SIGNAL
from clusterjob.node.system.codec import MalformedMessageError
from clusterjob.node.workers import forkserver_messages

MakeJob = Callable[..., Job]
HOST = socket.gethostname()

LATE = """
    import os, pathlib, signal, sys, threading, time
    from clusterjob import bootstrap

    def load_data():
        STUCK

    pathlib.Path(f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
    if os.environ["RANK"] == "LATE":
        load_data()
    while not os.path.exists("pidLATE"):  # its node may import torch later than the others
        time.sleep(0.02)
    with bootstrap.init(timeout=6) as ctx:
        print("met", ctx.rank, flush=True)
"""


def late(job: Job, rank: int, stuck: str) -> str:
    return job.script(LATE.replace("LATE", str(rank)).replace("STUCK", stuck))


def line_of(job: Job, rank: int) -> str:
    """Return the line number of `def load_data` in the script."""
    return next(
        str(number)
        for number, line in enumerate(job.path("script.py").read_text().splitlines(), 1)
        if "def load_data" in line
    )


def test_stuck_forked_worker_is_reported_with_stack_as_root_cause(make_job: MakeJob) -> None:
    job = make_job(2)
    stuck = "threading.Lock().acquire() and threading.Event().wait()"
    begin = time.monotonic()
    job.start_all(
        "--start", "fork", "--nproc-per-node", "2", late(job, 3, stuck), python=WITH_TORCH
    )
    logs = [job.dir / "logs" / f"node{rank // 2}" / f"rank{rank}.err" for rank in range(3)]

    def printed() -> str:
        """Return what the waiting ranks have printed; one of them speaks, mostly rank 0."""
        return "".join(log.read_text() for log in logs if log.exists())

    wait_until(lambda: "waits in threading.wait" in printed(), TEST_TIMEOUT)
    assert job.wait() == [1, 1]
    assert time.monotonic() - begin < 40
    pid, number = job.path("pid3").read_text(), int(line_of(job, 3)) + 1
    output = printed()
    worker = f"rank 3 (node 1, local rank 1, host {HOST}"
    assert f"clusterjob: {worker}, pid {pid}): has run for " in output
    assert (
        f"s and has not reached bootstrap.init(); it waits in threading.wait (script.py:{number})"
        in output
    )
    result = job.result
    assert result["reason"].startswith(
        f"{worker}): the others gave up waiting for it (pid {pid}): it has run for "
    )
    assert result["failure"]["rank"] == 3
    assert any("  load_data (" in line for line in result["failure"]["last_lines"])
    # Some of the other ranks may have been stopped before they reported.
    assert set() < {each["rank"] for each in result["consequences"]} <= {0, 1, 2}
    own = job.log(1, "rank3.err")
    assert "clusterjob: the others gave up waiting for this process, which has run for " in own
    assert f"script.py:{number})" in own
    assert not any("met" in job.log(rank // 2, f"rank{rank}.out") for rank in range(4))


@pytest.mark.slow
def test_stack_of_stuck_worker_started_by_exec_is_reported(make_job: MakeJob) -> None:
    job = make_job(2)
    job.start_all("--start", "exec", late(job, 1, "time.sleep(1000)"), python=WITH_TORCH)
    assert job.wait() == [1, 1]
    pid = job.path("pid1").read_text()
    output = job.log(0, "rank0.err")
    assert f"rank 1 (node 1, local rank 0, host {HOST}, pid {pid}): has run for " in output
    assert "s and has not reached bootstrap.init(); it is in load_data (script.py:" in output
    failure = job.result["failure"]
    assert (failure["rank"], failure["signal"]) == (1, None)
    assert "it has run for" in failure["message"]


def test_missing_rank_0_is_reported_by_other_ranks(make_job: MakeJob) -> None:
    job = make_job(2)
    job.start_all(late(job, 0, "time.sleep(1000)"), python=WITH_TORCH)
    assert job.wait() == [1, 1]
    output = job.log(1, "rank1.err")
    waiting = "clusterjob: waiting for rank 0 (node 0): started, and not yet at init(); "
    notice = next(line for line in output.splitlines() if line.startswith(waiting))
    assert 4 <= waited_seconds(notice) <= 4 + MARGIN
    pid = job.path("pid0").read_text()
    assert (
        f"clusterjob: rank 0 (node 0, local rank 0, host {HOST}, pid {pid}): has run for " in output
    )
    assert job.result["failure"]["rank"] == 0
    assert any("load_data (" in line for line in job.result["failure"]["last_lines"])


@pytest.mark.slow
def test_rank_that_exits_without_joining_is_root_cause(make_job: MakeJob) -> None:
    job = make_job(1)
    job.start_all("--nproc-per-node", "2", late(job, 1, "sys.exit(0)"), python=WITH_TORCH)
    assert job.wait() == [1]
    assert "): exited with code 0 and never joined the rendezvous" in job.log(0, "rank0.err")
    assert job.result["failure"]["rank"] == 1
    assert "it exited with code 0 and never joined the rendezvous" in job.result["reason"]


@pytest.mark.slow
def test_signal_handler_of_script_is_not_called(make_job: MakeJob) -> None:
    job = make_job(1)
    own = f"signal.signal({SIGNAL}, lambda *_: pathlib.Path('hit').touch()); time.sleep(1000)"
    job.start_all("--start", "fork", "--nproc-per-node", "2", late(job, 1, own), python=WITH_TORCH)
    assert job.wait() == [1]
    assert not job.path("hit").exists()
    assert "has not joined the rendezvous; it sleeps" in job.log(0, "rank0.err")
    assert job.result["failure"]["rank"] == 1


@pytest.mark.parametrize("ranks", ["1", 1, None, [True], [-1], ["1"], [[1]], {"1": 1}, [0] * 9])
def test_report_of_missing_ranks_with_wrong_ranks_is_refused(ranks: object) -> None:
    data = {"type": "WorkerWaiting", "local_rank": 0, "ranks": ranks, "final": True}
    with pytest.raises(MalformedMessageError, match="ranks"):
        forkserver_messages.FROM_WORKER.decode(data)
