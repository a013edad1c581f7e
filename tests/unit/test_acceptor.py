"""Connections at node 0: many at once, a limit for silent ones, and a stall of node 0."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from procs import TEST_TIMEOUT

from clusterjob.node.agent.connection import Search
from clusterjob.node.agent.node_workers import StateReport
from clusterjob.node.environments.topology import Topology
from clusterjob.node.logs.events import EventLog, read_events
from clusterjob.node.options import LaunchOptions, parse
from clusterjob.node.rendezvous.identity import JobIdentity, NodeJob
from clusterjob.node.rendezvous.membership import Membership, Stalls
from clusterjob.node.rendezvous.messages import ConnectionLost, Hello
from clusterjob.node.rendezvous.protocol import PROOF_SECONDS
from clusterjob.node.system import network

OPTIONS = parse(["x.py"])
JOB = JobIdentity("job", 0, b"token", [], has_torch=False)
NODE_0 = NodeJob(Topology(2, 0, 1, "", None, source="test"), OPTIONS, JOB, Path(), print)


@pytest.mark.parametrize(("count", "limit", "dropped"), [(200, 328, 0), (100, 10, 90)])
def test_waiting_agents_are_accepted_at_once_and_oldest_silent_ones_dropped_beyond_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, limit: int, dropped: int
) -> None:
    monkeypatch.setattr(Membership, "_max_waiting", lambda _self: limit)
    events = tmp_path / "events.jsonl"

    async def serve() -> int:
        members = Membership(NODE_0, EventLog(events))
        listener = socket.create_server(("127.0.0.1", 0))
        await members.open(listener, "127.0.0.1")
        peers = [socket.create_connection(listener.getsockname()) for _ in range(count)]
        for _ in range(400):  # turns of the event loop
            await asyncio.sleep(0)
        waiting = len(members._waiting)
        await members.close()
        for peer in peers:
            peer.close()
        return waiting

    assert asyncio.run(serve()) == count - dropped
    found = [each for each in read_events(events) if each["event"] == "unauthenticated"]
    assert {each["why"] for each in found} <= {"too many unauthenticated connections"}
    assert len(found) == min(dropped, 20), "a port scan must not fill the disk"


def test_stall_that_a_decision_notices_first_makes_no_agent_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LaunchOptions, "heartbeat", 0.01)
    moment = 100.0

    async def lost(stall: float) -> bool:
        nonlocal moment
        members = Membership(NODE_0, EventLog(tmp_path / "events.jsonl"))
        members.stalls = Stalls(OPTIONS.heartbeat, lambda: moment)
        peer = members.join(Hello(1, "gpu1", 1, 0, 2, 1), lambda _message: None)
        beating = asyncio.create_task(members._find_silent())
        await asyncio.sleep(0)
        moment += stall
        members.stalls.recent(OPTIONS.lease)  # as a decision does
        peer.heard_at -= 30
        await asyncio.sleep(0.1)
        beating.cancel()
        found = [members.inbox.get_nowait()[1] for _ in range(members.inbox.qsize())]
        return any(isinstance(each, ConnectionLost) for each in found)

    assert asyncio.run(lost(0.0))
    assert not asyncio.run(lost(30.0))


def test_silent_port_delays_no_search_for_the_coordinator(tmp_path: Path) -> None:
    """Such as that of a coordinator that was stopped, or of another program."""

    async def find(silent: socket.socket, listener: socket.socket) -> None:
        ports = [each.getsockname()[1] for each in (silent, listener)]
        node = replace(NODE_0, identity=replace(JOB, ports=ports), directory=tmp_path)
        members = Membership(node, EventLog(tmp_path / "events.jsonl"))
        await members.open(listener, "127.0.0.1")
        hello = Hello(1, "gpu1", 1, 0, 2, 1)
        search = Search(node, hello, StateReport(), time.monotonic() + TEST_TIMEOUT, first=True)
        channel = await asyncio.wait_for(search.run(["127.0.0.1"]), PROOF_SECONDS / 2)
        assert channel is not None
        await channel.close()
        await members.close()

    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        asyncio.run(find(silent, listener))


def test_agent_that_reaches_the_coordinator_twice_joins_once(tmp_path: Path) -> None:
    """Such as by two names of its host, or at a port that is a candidate twice."""

    async def find(listener: socket.socket) -> list[object]:
        ports = [listener.getsockname()[1]] * 2
        node = replace(NODE_0, identity=replace(JOB, ports=ports), directory=tmp_path)
        members = Membership(node, EventLog(tmp_path / "events.jsonl"))
        hello = Hello(1, "gpu1", 1, 0, 2, 1)
        search = Search(node, hello, StateReport(), time.monotonic() + TEST_TIMEOUT, first=True)
        searching = asyncio.create_task(search.run(["127.0.0.1", "localhost"]))
        await asyncio.sleep(0.2)  # all attempts are connected
        await members.open(listener, "127.0.0.1")
        channel = await searching
        assert channel is not None
        await asyncio.sleep(0.2)
        found = [members.inbox.get_nowait()[1] for _ in range(members.inbox.qsize())]
        await channel.close()
        await members.close()
        return found

    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = asyncio.run(find(listener))
    assert [type(each) for each in found] == [Hello]


def test_order_waits_for_no_acknowledgement_of_the_message_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: asyncio.Queue[int] = asyncio.Queue()

    async def note(_members: Membership, writer: asyncio.StreamWriter) -> str:
        connection = writer.get_extra_info("socket")
        await found.put(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        return ""

    monkeypatch.setattr(Membership, "_foreign", note)

    async def connect() -> int:
        members = Membership(NODE_0, EventLog(tmp_path / "events.jsonl"))
        listener = network.listen_at("127.0.0.1", 0, backlog=1)
        await members.open(listener, "127.0.0.1")
        with socket.create_connection(listener.getsockname()):
            option = await found.get()
        await members.close()
        return option

    assert asyncio.run(connect()) != 0


def test_error_of_search_names_the_ports_of_each_reason() -> None:
    node = replace(NODE_0, identity=replace(JOB, ports=[21, 22, 23]))
    hello = Hello(1, "gpu1", 1, 0, 2, 1)

    async def text() -> str:
        search = Search(node, hello, StateReport(), 0.0, first=True)
        search.errors.update({21: "connection refused", 23: "connection refused"})
        return search._error()

    why = "connection refused (ports 21, 23); no answer (port 22)"
    assert asyncio.run(text()) == f"node 0 cannot reach node 0 at : {why}"
