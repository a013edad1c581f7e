"""Spare nodes replace lost ones, and another node coordinates."""

from __future__ import annotations

import json
import os
import signal

from procs import QUICK_LEASE, TEST_TIMEOUT, Job, MakeJob, alive, below, kill_all

from clusterjob.node.logs.events import read_events

# Each worker writes its variables into `<restart>.<rank>`, and ends when `enough` exists.
PLACES = """
    import json, os, pathlib, time
    names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    seen = {name: int(os.environ[name]) for name in names} | {"pid": os.getpid()}
    name = os.environ["TORCHELASTIC_RESTART_COUNT"] + "." + os.environ["RANK"]
    pathlib.Path("new." + name).write_text(json.dumps(seen))
    os.rename("new." + name, name)
    print("restart", name, flush=True)
    while not pathlib.Path("enough").exists():
        time.sleep(0.05)
"""


def place(job: Job, restart: int, rank: int) -> tuple[int, int, int]:
    """Return the world size, node rank and number of nodes that a worker saw."""
    seen = json.loads(job.path(f"{restart}.{rank}").read_text())
    return seen["WORLD_SIZE"], seen["GROUP_RANK"], seen["GROUP_WORLD_SIZE"]


def test_spare_takes_place_of_lost_node(make_job: MakeJob) -> None:
    job = make_job(3)
    script = job.script(PLACES)
    job.start_all(
        "--spares", "1", "--nproc-per-node", "2", script, until=("0.0", "0.1", "0.2", "0.3")
    )
    forkserver = job.forkserver_of(job.agents[0])
    assert not (job.dir / "logs" / "node2" / "rank2.out").exists()
    job.agents[1].send_signal(signal.SIGKILL)
    job.wait_for("1.0", "1.1", "1.2", "1.3")
    assert job.forkserver_of(job.agents[0]) == forkserver
    job.path("enough").touch()
    assert job.wait() == [0, -signal.SIGKILL, 0]
    assert [place(job, 1, rank) for rank in range(4)] == [(4, 0, 2)] * 2 + [(4, 1, 2)] * 2
    assert job.log(2, "rank2.restart1.out") == "restart 1.2\n"
    assert [event["nodes"] for event in job.events("started")] == [[0, 1], [0, 2]]
    assert job.result["restarts"] == 1


def test_workers_of_frozen_agent_end_before_those_of_its_replacement_start(
    make_job: MakeJob,
) -> None:
    job = make_job(3)
    job.start_all("--spares", "1", *QUICK_LEASE, job.script(PLACES), until=("0.0", "0.1"))
    worker = json.loads(job.path("0.1").read_text())["pid"]
    os.kill(job.agent_of(1), signal.SIGSTOP)
    job.wait_for("1.1")
    assert not alive(worker)
    os.kill(job.agent_of(1), signal.SIGCONT)
    job.path("enough").touch()
    assert job.wait()[::2] == [0, 0]
    assert [event["nodes"] for event in job.events("started")] == [[0, 1], [0, 2]]


def kill_node(job: Job, number: int) -> None:
    """Kill all processes of a node at once, as when its machine loses power."""
    kill_all([job.agents[number].pid, *below(job.agents[number].pid)])


def test_another_node_coordinates_after_loss_of_node_0(make_job: MakeJob) -> None:
    job = make_job(3)
    job.start_all(
        "--spares",
        "1",
        "--max-restarts",
        "2",
        *QUICK_LEASE,
        job.script(PLACES),
        until=("0.0", "0.1"),
    )
    kill_node(job, 0)
    job.wait_for("1.0", "1.1")
    job.path("enough").touch()
    assert job.wait() == [-signal.SIGKILL, 0, 0]
    assert [place(job, 1, rank) for rank in range(2)] == [(2, 0, 2), (2, 1, 2)]
    assert (job.result["state"], job.result["restarts"]) == ("SUCCEEDED", 1)
    moved = list(read_events(job.dir / "events.1.node1.jsonl"))
    started = [event for event in moved if event["event"] == "started"]
    assert [event["nodes"] for event in started] == [[2, 1]]
    first = job.events("started")[0]
    assert first["monotonic"] < started[0]["monotonic"] < first["monotonic"] + TEST_TIMEOUT
