"""Workers that do not join the rendezvous of ranks.

Agents report what these workers do. If other ranks time out, these workers are the root cause.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from launching import HOST, MARGIN, waited_seconds
from procs import TEST_TIMEOUT, WITH_TORCH, Job, MakeJob, wait_until

from clusterjob.node.contract import World
from clusterjob.node.logs import log_files
from clusterjob.node.stacks.grouping import Frame, RankStack, ThreadStack
from clusterjob.node.states import Probe
from clusterjob.node.system.codec import MalformedMessageError
from clusterjob.node.workers import forkserver_messages
from clusterjob.node.workers.worker_failures import Failures, WorkerStatus

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
    assert not any("met" in job.log(rank // 2, f"rank{rank}.out") for rank in range(4))


def test_missing_rank_0_is_reported_by_other_ranks(make_job: MakeJob) -> None:
    job = make_job(2)
    job.run(late(job, 0, "time.sleep(1000)"), python=WITH_TORCH, code=1)
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


WORLD = World(
    0, "gpu0", 29500, agent_store=True, node_rank=1, nnodes=2, nproc=4, first_rank=4, world_size=8
)


def test_each_worker_that_others_wait_for_is_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[Path]()
    monkeypatch.setattr(log_files, "last_lines", lambda path: read.append(path) or ())
    failures = Failures(1, "gpu1", directory=tmp_path, attempt=0)
    status = WorkerStatus(failures, WORLD)
    probe = Probe((4, 5, 6, 7), gave_up=True)
    lines, _ = status.describe(probe, [])
    assert lines[0] == (
        "rank 4 (node 1, local rank 0, host gpu1): was not started: its node still imports torch"
    )
    status.started, status.ended[0] = time.monotonic() - 9.2, "exited with code 0"
    frames = {
        5: (Frame("/p/clusterjob/bootstrap.py", 7, "init"),),
        6: (Frame("/w/a.py", 40, "load_data"), Frame("/w/train.py", 9, "<module>")),
        7: (),
    }
    stacks = [
        RankStack(
            rank, 1, "gpu1", 1000 + rank, "sleeps", bool(own), (ThreadStack("MainThread", own),)
        )
        for rank, own in frames.items()
    ]
    read.clear()
    lines, missing = status.describe(probe, stacks)
    assert [path.stem for path in read] == ["rank4", "rank7"]  # those without a stack
    texts, ran = [line.partition("): ")[2] for line in lines], "has run for 9 s"
    assert texts == [
        "exited with code 0 and never joined the rendezvous",
        f"{ran} and is inside bootstrap.init(); it waits in bootstrap.init (bootstrap.py:7)",
        f"{ran} and has not reached bootstrap.init(); it is in load_data (a.py:40)",
        f"{ran} and has not joined the rendezvous; it does not answer: the process sleeps",
    ]
    assert lines[2].startswith("rank 6 (node 1, local rank 2, host gpu1, pid 1006): ")
    assert [each.rank for each in missing] == [4, 5, 6, 7]
    assert missing[2].message.startswith(
        "the others gave up waiting for it (pid 1006): it has run for 9 s"
    )
    assert missing[2].last_lines[1:] == (
        "  load_data (/w/a.py:40)",
        "  <module> (/w/train.py:9)",
    )


@pytest.mark.parametrize("ranks", ["1", 1, None, [True], [-1], ["1"], [[1]], {"1": 1}, [0] * 9])
def test_report_of_missing_ranks_with_wrong_ranks_is_refused(ranks: object) -> None:
    data = {"type": "Missing", "local_rank": 0, "ranks": ranks, "gave_up": True}
    with pytest.raises(MalformedMessageError, match="ranks"):
        forkserver_messages.FROM_WORKER.decode(data)
