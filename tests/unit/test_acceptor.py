"""Connections at node 0: many at once, a limit for silent ones, and a stall of node 0."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

from clusterjob.node.logs.events import EventLog
from clusterjob.node.options import parse
from clusterjob.node.rendezvous.identity import JobIdentity
from clusterjob.node.rendezvous.membership import Acceptor, Membership, Stalls
from clusterjob.node.rendezvous.messages import ConnectionLost, Hello


async def accepted(waiting: int, limit: int, turns: int) -> tuple[int, list[str]]:
    """Return the open connections and the reasons of the dropped ones after some loop turns."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=waiting)
    peers = [socket.create_connection(listener.getsockname()) for _ in range(waiting)]
    opened: list[object] = []
    dropped: list[str] = []

    async def handle(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        opened.append(reader)
        await reader.read()

    acceptor = Acceptor(
        listener,
        handle,
        max_waiting=lambda: limit,
        dropped=lambda _address, why: dropped.append(why),
    )
    serving = asyncio.create_task(acceptor.serve())
    for _ in range(turns):
        await asyncio.sleep(0)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    count = len(opened) - len(dropped)
    await acceptor.close(0.0)
    for peer in peers:
        peer.close()
    return count, dropped


def test_many_waiting_agents_are_accepted_within_a_few_turns_of_event_loop() -> None:
    assert asyncio.run(accepted(200, limit=328, turns=12)) == (200, [])


def test_oldest_silent_connections_are_dropped_beyond_limit() -> None:
    count, dropped = asyncio.run(accepted(100, limit=10, turns=400))
    assert count <= 10
    assert dropped == ["too many unauthenticated connections"] * 90


def test_stall_that_a_decision_notices_first_makes_no_agent_silent(tmp_path: Path) -> None:
    moment = 100.0
    options = replace(parse(["x.py"]), heartbeat=0.01)
    job = JobIdentity("job", 0, b"token", [], has_torch=False)

    async def lost(stall: float) -> bool:
        nonlocal moment
        members = Membership(2, 0, options, job, EventLog(tmp_path / "events.jsonl"))
        members.stalls = Stalls(options.heartbeat, lambda: moment)
        peer = members.join(Hello(1, "gpu1", 1, 0, 2, 1), lambda _message: None)
        beating = asyncio.create_task(members._send_heartbeats())
        await asyncio.sleep(0)
        moment += stall
        members.stalls.recent(options.lease)  # as a decision does
        peer.heard_at -= 30
        await asyncio.sleep(0.1)
        beating.cancel()
        found = [members.inbox.get_nowait()[1] for _ in range(members.inbox.qsize())]
        return any(isinstance(each, ConnectionLost) for each in found)

    assert asyncio.run(lost(0.0))
    assert not asyncio.run(lost(30.0))
