"""The acceptor takes many waiting connections at once, and limits those that say nothing."""

from __future__ import annotations

import asyncio
import socket

from clusterjob.node.rendezvous.membership import Acceptor


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
