"""A peer without the job's secret ends no job; a compromised node that ends one is named."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from procs import TEST_TIMEOUT, Job, MakeJob, wait_until

from clusterjob.node.environments.topology import Topology
from clusterjob.node.logs.events import EventLog
from clusterjob.node.options import parse
from clusterjob.node.rendezvous import messages, protocol
from clusterjob.node.rendezvous.identity import JobIdentity, NodeJob
from clusterjob.node.rendezvous.membership import Membership
from clusterjob.node.stacks.grouping import Frame, RankStack, ThreadStack
from clusterjob.node.states import NodeState, Order, Request
from clusterjob.node.system.codec import Codec, MalformedMessageError

FILE_LIMIT = 256  # open files


def coordinator_port(job: Job) -> int:
    wait_until(lambda: job.events("listening"), TEST_TIMEOUT)
    return int(job.events("listening")[0]["port"])


def open_idle_connections(port: int, count: int) -> list[socket.socket]:
    """Open connections that send nothing."""
    return [socket.create_connection(("127.0.0.1", port), 10) for _ in range(count)]


OPENINGS = [
    b"\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b'{"clusterjob": 1}\n',
    b"\xff" * 4096,
    b"[" * 3000 + b"\n",
    b'{"clusterjob": 1, "job": "JOB", "nonce": "x"}\n',
    b'{"clusterjob": 1, "job": "JOB", "nonce": "x"}\n00 {}\n',
    b'{"clusterjob": 1, "job": "JOB", "nonce": "x"}\n' + b"0" * (protocol.LINE_BYTES + 2),
]


def flood(port: int, job_id: str, *, waves: int, size: int = 400) -> None:
    """Open many connections that send something and leave at once, half of them by a reset."""
    for _ in range(waves):
        made = open_idle_connections(port, size)
        for number, peer in enumerate(made):
            if number % 2:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.setblocking(False)
            with contextlib.suppress(OSError):
                peer.send(OPENINGS[number // 2 % len(OPENINGS)].replace(b"JOB", job_id.encode()))
            peer.close()


def test_idle_connections_and_floods_do_not_end_a_job(make_job: MakeJob) -> None:
    """Open more connections than the agent may open files, while it restarts its workers.

    The restart needs a new socket.
    """
    job = make_job(2)
    script = job.script("""
        import os, pathlib, sys, time
        restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
        pathlib.Path("up" + restart + os.environ["RANK"]).touch()
        while not pathlib.Path("leave" + restart).exists():
            time.sleep(0.02)
        sys.exit(3 if restart == "0" else 0)
    """)
    limit = 'ulimit -n 136; exec "$@"'
    python = ("sh", "-c", limit, "sh", sys.executable, "-S")
    job.start(0, "--max-restarts", "1", script, python=python)
    port = coordinator_port(job)
    flood(port, job.id, waves=3)  # while it waits for node 1
    job.start(1, "--max-restarts", "1", script, python=python)
    peers = open_idle_connections(port, 3 * FILE_LIMIT)
    try:
        job.wait_for("up00", "up01")
        flood(port, job.id, waves=3)
        peers += open_idle_connections(port, 3 * FILE_LIMIT)
        job.path("leave0").touch()
        job.path("leave1").touch()
        assert job.wait() == [0, 0], job.stderr(job.agents[0])
    finally:
        for peer in peers:
            peer.close()
    assert (job.result["state"], job.result["restarts"]) == ("SUCCEEDED", 1)
    assert "Traceback" not in job.stderr(job.agents[0])
    assert 0 < len(job.events("unauthenticated")) < 40, "peers must not fill the job's disk"


def test_agent_raises_its_open_file_limit_and_workers_keep_theirs(
    make_job: MakeJob,
) -> None:
    job = make_job()
    script = job.script("""
        import os, resource
        print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        with open(f"/proc/{os.getppid()}/stat") as stat:  # the forkserver's parent is the agent
            agent = int(stat.read().rpartition(")")[2].split()[1])
            print(resource.prlimit(agent, resource.RLIMIT_NOFILE))
    """)
    limit = f'ulimit -Sn {FILE_LIMIT}; exec "$@"'
    job.run(script, python=("sh", "-c", limit, "sh", sys.executable, "-S"))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert job.log(0, "rank0.out").splitlines() == [str(FILE_LIMIT), str((hard, hard))]


# -- a compromised node that knows the secret ------------------------------------------------------


def failure(**changes: Any) -> dict[str, Any]:
    fields = {
        "rank": 1, "local_rank": 0, "node_rank": 1, "host": "h", "exit_code": 1, "signal": None,
        "message": "m", "last_lines": [], "effect": False, "kind": "code",
    }  # fmt: skip
    return fields | changes


def state(**fields: Any) -> dict[str, Any]:
    return {"type": "NodeState"} | fields


def failing(**changes: Any) -> dict[str, Any]:
    return state(failing=[{"failure": failure(), "age": 0, "exited": True} | changes])


def ranks_missing(ranks: list[Any]) -> dict[str, Any]:
    return state(missing={"local_rank": 0, "ranks": ranks, "gave_up": True})


OF_NODE_0 = {"failure": failure(node_rank=0), "age": 0, "exited": True}
# No message has such fields.
MALFORMED: dict[str, Any] = {
    "a name that is a list": {"type": ["NodeState"]},
    "a message of the coordinator": {"type": "Order"},
    "a failure without fields": failing(failure={}),
    "a failure that is a number": failing(failure=1),
    "a failure of rank -1": failing(failure=failure(rank=-1)),
    "a text that is a list": failing(failure=failure(message=["x"])),
    "an age that is a text": failing(age="old"),
    "an infinite age": failing(age=float("inf")),
    "an exit code that is too large": failing(failure=failure(exit_code=10**30)),
    "ranks below 0": ranks_missing([-1]),
    "ranks that are texts": ranks_missing(["1"]),
    "lines that are numbers": state(probed={"number": 1, "lines": [1], "failures": []}),
    "a cancellation for a number": state(request={"cancel": 1}),
}
# Only the rest of a message, or the node that sends it, makes these wrong.
FALSE: dict[str, Any] = {
    "no name": {},
    "a failure of node 0": failing(failure=failure(node_rank=0)),
    "an exit code above 255": failing(failure=failure(exit_code=256)),
    "a probed failure of node 0": state(
        probed={"probe": {"ranks": [1]}, "lines": [], "failures": [failure(node_rank=0)]}
    ),
    "an early exit of node 0": state(exits=[OF_NODE_0]),
}


class AnyMessage(Codec):
    """A codec that also sends dictionaries, without a check."""

    def encode(self, message: Any) -> bytes:
        if isinstance(message, dict):
            return json.dumps(message).encode()
        return messages.FROM_AGENT.encode(message)


async def join_and_send(
    job: Job,
    port: int,
    *sent: Any,
    once_started: Any = None,
    answer: Callable[[Any], list[Any]] = lambda _: [],
    **changes: Any,
) -> BaseException | None:
    """Join as node 1, send messages and wait for the end; return the refusal, if there is one.

    `answer` returns the messages to send for each message of the coordinator.
    """
    hello = {
        "type": "Hello",
        "attempt": 0,
        "node_rank": 1,
        "nnodes": 2,
        "nproc": 1,
        "host": "h",
        "pid": 7,
    } | changes
    streams = await asyncio.open_connection("127.0.0.1", port, limit=protocol.LINE_BYTES)
    try:
        channel = await protocol.authenticate_to_coordinator(
            *streams, token=job.token.encode(), job_id=job.id
        )
        channel._sends = AnyMessage()
        channel.send(hello)
        for message in sent:
            channel.send(message)
        while (reply := await channel.receive()) is not None:
            if isinstance(reply, messages.Refused):
                return protocol.RefusedError(reply.why)
            if isinstance(reply, Order) and reply.world is not None:
                for message in once_started or ():
                    channel.send(message)
                once_started = None
            for message in answer(reply):
                channel.send(message)
    finally:
        streams[1].close()
    return None


def refusal(joining: Coroutine[Any, Any, BaseException | None]) -> BaseException | None:
    """Run `join_and_send` to its end; return the refusal, if there is one."""
    return asyncio.run(asyncio.wait_for(joining, TEST_TIMEOUT))


@pytest.mark.parametrize("name", MALFORMED)
def test_message_with_wrong_fields_is_malformed(name: str) -> None:
    with pytest.raises(MalformedMessageError):
        messages.FROM_AGENT.decode(MALFORMED[name])


@pytest.mark.parametrize("name", FALSE)
def test_node_that_sends_invalid_message_fails_job_and_is_named(
    make_job: MakeJob, name: str
) -> None:
    job = make_job(2)
    job.start(0, job.script("import time; time.sleep(1000)"))
    port = coordinator_port(job)
    refusal(join_and_send(job, port, FALSE[name], host="\x1b]0;x\x07"))
    assert job.wait() == [1]
    assert (job.result["state"], job.result["failure"]["node_rank"]) == ("FAILED", 1)
    assert "it sent an invalid message" in job.result["reason"]
    assert "Traceback" not in job.stderr(job.agents[0])
    assert "\x1b" not in job.stderr(job.agents[0]) + job.result["reason"]


CANCELLED = NodeState(request=Request(cancel="x"))


def test_node_cannot_send_stacks_for_ranks_of_another_node(make_job: MakeJob) -> None:
    """The stacks name the rank that hangs: a false one would blame another host."""

    def false_stacks(host: str) -> list[messages.StackFound]:
        frames_ = (Frame("/w/\x1b[2J.py", 7, "blamed\x1b]0;x\x07\nFAILED"),)
        return [
            messages.StackFound(
                0, RankStack(rank, 1, host, 7, "runs", True, (ThreadStack("MainThread", frames_),))
            )
            for rank in (0, 1, 2, 1 << 20)
        ]

    runs = NodeState(0, started=True, idle=False, quiet=1e6)

    def answer(message: Any) -> list[Any]:
        if not isinstance(message, Order) or message.world is None:
            return [NodeState(0, ended=True)] if getattr(message, "stop", None) else []
        if message.collect:
            collected = replace(runs, collected=True, dumps=("x",))
            return [*false_stacks("forged"), collected] * 2
        # Stacks that nobody has asked for must not fill the memory of node 0.
        return [*false_stacks("unasked"), replace(runs, sampled=message.sample)]

    job = make_job(2)
    script = job.script("""
        import time
        def rest():
            time.sleep(1000)
        rest()
    """)
    job.start(0, "--hang-timeout", "3s", script)
    early = false_stacks("early")
    port = coordinator_port(job)
    refusal(join_and_send(job, port, *early, once_started=[runs], answer=answer))
    assert job.wait() == [1]
    assert job.result["failure"]["kind"] == "hang"
    assert "rest (script.py:4)" in job.result["reason"]
    saved = json.loads((job.dir / "logs/node0/stacks.json").read_text())
    found = {each["rank"]: each for each in saved["ranks"]}
    assert set(found) == {0, 1}
    assert found[0]["threads"][0]["frames"][0]["function"] == "rest"
    assert (found[1]["node_rank"], found[1]["host"]) == (1, "h")
    assert saved["flight_recorder"] == ["x"]
    said = job.stderr(job.agents[0]) + job.stdout(job.agents[0])
    assert "rest (script.py:4)" in said
    assert "\x1b" not in said
    assert "\nFAILED" not in said


def test_invalid_hello_ends_the_connection_and_job_continues(make_job: MakeJob) -> None:
    job = make_job(2)
    script = job.script("print('ran')")
    job.start(0, script)
    for changes in ({"nproc": 10**9}, {"node_rank": -1}, {"host": ["h"]}):
        refusal(join_and_send(job, coordinator_port(job), NodeState(), **changes))
    job.start(1, script)
    assert job.wait() == [0, 0], job.stderr(job.agents[0])


# -- jobs without a secret -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "nodes", "token", "message"),
    [
        (["--require-token"], 2, "", "could join the job or end it"),
        (["--launcher", "ray"], 2, "", "could run code as you in Ray"),
        ([], 1, "0123456789abcde", "the token has 15 bytes: it must have at least 16"),
    ],
)
def test_missing_or_short_token_is_refused(
    make_job: MakeJob, options: list[str], nodes: int, token: str, message: str
) -> None:
    job = make_job(nodes)
    job.start(0, *options, job.script("print('ran')"), env={"CLUSTERJOB_TOKEN": token})
    assert job.wait() == [2]
    said = job.stderr(job.agents[0])
    assert message in said
    if not token:
        assert said.startswith(
            "clusterjob: 2 nodes and no CLUSTERJOB_TOKEN: everyone who can connect to node 0 "
        )


OPEN = {"CLUSTERJOB_TOKEN": ""}
WAIT = """
    import os, pathlib, sys, time
    restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
    pathlib.Path(f"up{restart}{os.environ['RANK']}").touch()
    while not pathlib.Path("leave" + restart).exists():
        time.sleep(0.02)
    sys.exit(3 if restart == "0" else 0)
"""


@pytest.mark.parametrize("secret", ["a token", "no token"])
def test_member_cannot_join_in_the_place_of_another_node(make_job: MakeJob, secret: str) -> None:
    """Also not in a job without a token, which runs and says once what that means."""
    job = make_job(2)
    env = OPEN if secret == "no token" else {}
    script = job.script(WAIT)
    for node in (0, 1):
        job.start(node, "--max-restarts", "1", script, env=env)
    job.wait_for("up00", "up01")
    if env:
        job.token = f"clusterjob:{job.id}:0"
    for key in ("", "0" * 32, "\ud800"):
        refused = refusal(join_and_send(job, coordinator_port(job), again=True, key=key))
        assert isinstance(refused, protocol.RefusedError)
        assert "node_rank 1 is claimed twice" in refused.message
    job.path("leave0").touch()
    job.path("leave1").touch()
    assert job.wait() == [0, 0], job.stderr(job.agents[0])
    assert (job.result["restarts"], job.events("lost")) == (1, [])
    notice = "agents join from any address; this prevents accidents, not attacks"
    assert [job.stderr(agent).count(notice) for agent in job.agents] == [bool(env), 0]


HELLO = messages.Hello(1, "h", pid=7, attempt=0, nnodes=2, nproc=1, key="own")


@contextlib.asynccontextmanager
async def members(tmp_path: Path, *, is_open: bool = False) -> AsyncIterator[Membership]:
    """Yield the members of a job of two nodes; the agent of node 1 joins with `HELLO`."""
    job = JobIdentity("j", 0, b"t" * 16, ports=[0], has_torch=False, is_open=is_open)
    events = EventLog(tmp_path / "events.jsonl")
    node = NodeJob(Topology(2, 0, 1, "", None, ""), parse(["x.py"]), job, tmp_path, print)
    yield Membership(node, events)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"nnodes": 3}, "counts 3 nodes, node 0 counts 2"),
        ({"attempt": 1}, "this is attempt 0 of the job, not 1"),
        ({"node_rank": 5}, "node_rank must be between 0 and 1"),
        ({}, "node_rank 1 is claimed twice"),
    ],
)
def test_agent_that_does_not_fit_the_job_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    async def join() -> None:
        async with members(tmp_path) as joined:
            joined.join(HELLO, lambda _message: None)
            with pytest.raises(protocol.RefusedError, match=why):
                joined.join(replace(HELLO, **changes, key="other"), lambda _message: None)

    asyncio.run(join())


@pytest.mark.parametrize("is_open", [True, False])
def test_lost_node_is_replaced_by_another_agent_only_with_a_token(
    tmp_path: Path, is_open: bool
) -> None:
    async def join_thrice() -> None:
        async with members(tmp_path, is_open=is_open) as joined:
            joined.join(HELLO, lambda _message: None).lost = True
            expected = pytest.raises(protocol.RefusedError) if is_open else contextlib.nullcontext()
            with expected:
                joined.join(replace(HELLO, key="other"), lambda _message: None)
            if is_open:
                joined.join(HELLO, lambda _message: None)

    asyncio.run(join_thrice())


def test_one_node_without_secret_generates_an_unguessable_one(make_job: MakeJob) -> None:
    """A secret derived from the job's identity, as in an older release, is refused."""
    job = make_job()
    env = {"CLUSTERJOB_TOKEN": "", "CLUSTERJOB_NNODES": "1"}
    job.start(
        0,
        job.script("import pathlib, time; pathlib.Path('up').touch(); time.sleep(1000)"),
        env=env,
        until=("up",),
    )
    job.token = f"clusterjob:{job.id}:0"
    with pytest.raises(protocol.UnauthenticatedError):
        refusal(join_and_send(job, coordinator_port(job), CANCELLED))
    job.agents[0].terminate()
    job.wait()
    assert "x" not in job.result["reason"].split()
