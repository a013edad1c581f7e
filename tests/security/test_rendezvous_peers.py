"""Who reaches node 0 without the job's secret, and what a compromised node may say: neither ends a
job by surprise.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from procs import PATIENCE, Job, wait_until

from clusterjob.node.rendezvous import protocol

NewJob = Callable[..., Job]
FEW = 256  # open files


@contextlib.contextmanager
def few_files() -> Iterator[None]:
    """Processes that are started meanwhile may open few files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def lead_port(job: Job) -> int:
    wait_until(lambda: job.events("listening"), PATIENCE)
    return int(job.events("listening")[0]["port"])


def idle(port: int, count: int) -> list[socket.socket]:
    """Open connections that say nothing."""
    made = []
    for _ in range(count):
        made.append(socket.create_connection(("127.0.0.1", port), 10))
    return made


def test_idle_connections_do_not_end_a_job(new_job: NewJob) -> None:
    """More than the agent may open files; it restarts its workers meanwhile, which takes a new
    socket.
    """
    job = new_job(2)
    script = job.script("""
        import os, pathlib, sys, time
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            pathlib.Path("up" + os.environ["RANK"]).touch()
            while not pathlib.Path("leave").exists():
                time.sleep(0.02)
            sys.exit(3)
    """)
    limit = f"ulimit -n {FEW}; exec " + '"$@"'
    for node_rank in (0, 1):
        job.start(
            node_rank,
            "--max-restarts",
            "1",
            script,
            python=("sh", "-c", limit, "sh", sys.executable, "-S"),
        )
    port = lead_port(job)
    strangers = idle(port, 3 * FEW)
    try:
        job.wait_for("up0", "up1")
        strangers += idle(port, 3 * FEW)
        job.path("leave").touch()
        assert job.wait() == [0, 0], job.stderr(job.agents[0])
    finally:
        for stranger in strangers:
            stranger.close()
    assert (job.result["state"], job.result["restarts"]) == ("SUCCEEDED", 1)
    assert 0 < len(job.events("stranger")) < 40, "strangers must not fill the job's disk"


def test_a_stranger_who_says_nothing_is_hung_up_on(new_job: NewJob) -> None:
    job = new_job(2)
    job.start(0, "--join-timeout", "30", job.script("print('ran')"))
    with contextlib.closing(idle(lead_port(job), 1)[0]) as stranger:
        stranger.settimeout(PATIENCE)
        assert stranger.recv(1) == b""
    job.agents[0].terminate()
    job.wait()
    assert job.events("stranger")


def test_the_agent_takes_all_files_that_it_may_open_and_leaves_the_workers_their_limit(
    new_job: NewJob,
) -> None:
    job = new_job()
    script = job.script("""
        import os, resource
        print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        with open(f"/proc/{os.getppid()}/stat") as stat:  # the starter's parent is the agent
            print(resource.prlimit(int(stat.read().rpartition(")")[2].split()[1]), resource.RLIMIT_NOFILE))
    """)
    with few_files():
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        job.start(0, script)
    assert job.wait() == [0]
    assert job.log(0, "rank0.out").splitlines() == [str(FEW), str((hard, hard))]


# -- a node that knows the secret and has been taken over ----------------------------------------------------------------


def failure(**changes: Any) -> dict[str, Any]:
    fields = {"rank": 1, "local_rank": 0, "node_rank": 1, "host": "h", "exit_code": 1, "signal": None, "message": "m", "last_lines": [],
              "effect": False, "kind": None}  # fmt: skip
    return fields | changes


HOSTILE: dict[str, Any] = {
    "an event with fields of its own": {"t": "event", "event": "x", "details": {"event": "y"}},
    "an event whose details are no mapping": {"t": "event", "event": "x", "details": 7},
    "no kind": {},
    "a kind that is none": {"t": ["done"]},
    "somebody else's loss": {"t": "lost", "why": "x"},
    "a failure of node 0": {
        "t": "failing",
        "failure": failure(node_rank=0),
        "age": 0,
        "exited": True,
    },
    "a failure without fields": {"t": "failing", "failure": {}, "age": 0, "exited": True},
    "a failure that is a number": {"t": "failing", "failure": 1, "age": 0, "exited": True},
    "a text that is a list": {
        "t": "failing",
        "failure": failure(message=["x"]),
        "age": 0,
        "exited": True,
    },
    "an age that is none": {"t": "failing", "failure": failure(), "age": "old", "exited": True},
    "an endless age": {"t": "failing", "failure": failure(), "age": float("inf"), "exited": True},
    "an exit code without end": {
        "t": "failing",
        "failure": failure(exit_code=10**30),
        "age": 0,
        "exited": True,
    },
    "ranks below 0": {"t": "missing", "restart": 0, "local_rank": 0, "ranks": [-1], "final": True},
    "ranks that are texts": {
        "t": "missing",
        "restart": 0,
        "local_rank": 0,
        "ranks": ["1"],
        "final": True,
    },
    "lines that are numbers": {
        "t": "where",
        "restart": 0,
        "final": True,
        "lines": [1],
        "failures": [],
    },
    "a wish without words": {"t": "cancel"},
    "exits of nobody": {
        "t": "checked",
        "restart": 0,
        "exits": [{"failure": failure(rank=None, local_rank=None), "age": 0}],
    },
}


async def say(
    job: Job, port: int, *said: Any, once_started: Any = None, **changes: Any
) -> BaseException | None:
    """Join as node 1, say something and wait for the end; returns why it was refused, if it was."""
    hello = {
        "job": job.id,
        "attempt": 0,
        "node_rank": 1,
        "nnodes": 2,
        "nproc": 1,
        "host": "h",
        "pid": 7,
        "counted_by": "",
        "endpoints": [],
    }
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=protocol.LINE_BYTES)
    try:
        channel = await protocol.greet_lead(
            reader, writer, token=job.token.encode(), hello=hello | changes
        )
        for message in said:
            channel.send(message)
        while (heard := await channel.receive()) is not None:
            if heard["t"] == "start":
                for message in once_started or ():
                    channel.send(message)
    except protocol.Refused as error:
        return error
    finally:
        writer.close()
    return None


@pytest.mark.parametrize("what", HOSTILE)
def test_a_node_that_sends_what_no_agent_sends_is_named_and_breaks_nothing(
    new_job: NewJob, what: str
) -> None:
    job = new_job(2)
    job.start(0, job.script("import time; time.sleep(1000)"))
    port = lead_port(job)
    asyncio.run(asyncio.wait_for(say(job, port, HOSTILE[what]), PATIENCE))
    assert job.wait() == [1]
    assert (job.result["state"], job.result["failure"]["node_rank"]) == ("FAILED", 1)
    assert "it sent what no agent sends" in job.result["reason"]
    assert "Traceback" not in job.stderr(job.agents[0])


PROGRESS: list[dict[str, Any]] = [
    {"t": "succeeded", "local_rank": 0},
    {"t": "running"},
    {"t": "done"},
    {"t": "stopped"},
]


def test_a_node_that_reports_workers_before_the_round_does_not_break_node_0(
    new_job: NewJob,
) -> None:
    job = new_job(3)
    job.start(0, "--join-timeout", "8", job.script("print('ran')"))
    asyncio.run(asyncio.wait_for(say(job, lead_port(job), *PROGRESS, nnodes=3), PATIENCE))
    assert job.wait() == [1]
    assert "node 2 of 3 never joined" in job.result["reason"]
    assert not job.events("running")


@pytest.mark.slow
def test_a_success_of_a_worker_that_a_node_does_not_have_counts_for_no_rank(
    new_job: NewJob,
) -> None:
    """Rank 2 of 2 succeeds: nobody is named as the last that runs, and the job ends as its workers
    do.
    """
    job = new_job(2)
    job.start(0, "--lease", "60", job.script("import time; time.sleep(12)"))
    said = [{"t": "succeeded", "local_rank": 1}, {"t": "running"}, {"t": "done"}, {"t": "stopped"}]
    asyncio.run(asyncio.wait_for(say(job, lead_port(job), once_started=said), PATIENCE))
    assert job.wait() == [0]
    assert not job.events("stragglers")


@pytest.mark.parametrize(
    "changes",
    [
        {"nproc": -5},
        {"nproc": 10**9},
        {"nproc": float("inf")},
        {"node_rank": -1},
        {"pid": "x"},
        {"endpoints": [1]},
        {"host": ["h"]},
    ],
)
def test_a_hello_that_no_agent_says_is_refused_and_the_job_goes_on(
    new_job: NewJob, changes: dict[str, Any]
) -> None:
    job = new_job(2)
    script = job.script("print('ran')")
    job.start(0, script)
    refused = asyncio.run(
        asyncio.wait_for(say(job, lead_port(job), {"t": "done"}, **changes), PATIENCE)
    )
    assert isinstance(refused, protocol.Refused)
    job.start(1, script)
    assert job.wait() == [0, 0], job.stderr(job.agents[0])


def test_a_host_s_name_does_not_reach_the_terminal_as_it_is(new_job: NewJob) -> None:
    job = new_job(2)
    job.start(0, job.script("print('ran')"))
    asyncio.run(
        asyncio.wait_for(
            say(job, lead_port(job), {"t": "done"}, host="\x1b]0;x\x07", node_rank=5), PATIENCE
        )
    )
    assert job.wait() == [1]
    assert "\x1b" not in job.stderr(job.agents[0]) + json.dumps(job.result)
    assert "none of 2 nodes" in job.result["reason"]


# -- no secret -------------------------------------------------------------------------------------------------------------


def launched(job: Job, *options: str, nnodes: int) -> subprocess.CompletedProcess[str]:
    env = {
        name: value for name, value in os.environ.items() if not name.startswith("CLUSTERJOB_TOKEN")
    }
    env |= {
        "CLUSTERJOB_NNODES": str(nnodes),
        "CLUSTERJOB_NODE_RANK": "0",
        "CLUSTERJOB_MASTER_ADDR": "127.0.0.1",
        "CLUSTERJOB_JOB_DIR": str(job.dir),
    }
    argv = [
        sys.executable,
        "-S",
        "-m",
        "clusterjob.node",
        "--join-timeout",
        "1",
        *options,
        job.script("print('ran')"),
    ]
    return subprocess.run(
        argv, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def test_several_nodes_without_a_secret_are_refused(new_job: NewJob) -> None:
    ended = launched(new_job(2), nnodes=2)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[0] == (
        "clusterjob: 2 nodes and no CLUSTERJOB_TOKEN: anybody who reaches node 0 could join the job, or end it"
    )


def test_several_nodes_without_a_secret_meet_where_that_is_asked_for_and_logged(
    new_job: NewJob,
) -> None:
    ended = launched(new_job(2), "--insecure-no-token", nnodes=2)
    assert (
        "clusterjob: --insecure-no-token: anybody who reaches 127.0.0.1 can join this job, or end it"
        in ended.stderr.splitlines()
    )
    assert "node 1 of 2 never joined" in ended.stderr


def test_one_node_without_a_secret_makes_one_that_nobody_can_guess(new_job: NewJob) -> None:
    """What an older release derived from the job's identity opens no door."""
    job = new_job()
    env = {"CLUSTERJOB_TOKEN": "", "CLUSTERJOB_NNODES": "1"}
    job.start(
        0, job.script("import pathlib, time; pathlib.Path('up').touch(); time.sleep(1000)"), env=env
    )
    job.wait_for("up")
    job.token = f"clusterjob:{job.id}:0:127.0.0.1-0-1"
    with pytest.raises(protocol.Stranger):
        asyncio.run(
            asyncio.wait_for(say(job, lead_port(job), {"t": "cancel", "why": "x"}), PATIENCE)
        )
    job.agents[0].terminate()
    job.wait()
    assert "x" not in job.result["reason"].split()
