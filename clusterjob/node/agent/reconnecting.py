"""Look for the coordinator after it was lost, or after this node's agent was killed."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clusterjob.errors import RendezvousError
from clusterjob.node.rendezvous import coordinator_link, messages
from clusterjob.node.rendezvous.coordinator_link import RemoteLink
from clusterjob.node.rendezvous.identity import NodeJob
from clusterjob.node.rendezvous.protocol import HANDSHAKE_SECONDS, Channel
from clusterjob.node.states import NodeState

# Seconds between two rounds of attempts: the first pause and the longest.
_FIRST_PAUSE, _MAX_PAUSE = 0.02, 0.3
_CHECK_INTERVAL = 0.3  # seconds between two checks for the job's verdict


@dataclass(frozen=True)
class Search:
    """The search for the coordinator; times are of the monotonic clock.

    Attributes:
        addresses: where it may listen.
        deadline: when to give up.
        turn: when this agent becomes the coordinator itself; infinity if it may not.
    """

    addresses: Sequence[str]
    deadline: float
    turn: float = math.inf


async def reconnect(
    search: Search,
    node: NodeJob,
    hello: messages.Hello,
    leave: Callable[[], NodeState | None],
    ended: Callable[[], bool],
) -> RemoteLink | None:
    """Join again; return the link, or None if the job has ended or it is this agent's turn.

    Args:
        search: where and how long to look.
        node: the job, as this node sees it.
        hello: the first message of this agent.
        leave: returns the state of this node if the job was cancelled, else None.
        ended: returns whether the job's verdict is recorded.

    Raises:
        RendezvousError: no coordinator has admitted this agent in time.
    """
    begin, why = time.monotonic(), "no answer"

    async def join_at(address: str) -> Channel:
        nonlocal why
        pause = _FIRST_PAUSE
        while True:
            for port in node.identity.ports:
                try:
                    return await coordinator_link.attempt(
                        address,
                        port,
                        job=node.identity,
                        hello=hello,
                        leave=leave,
                        proof_seconds=HANDSHAKE_SECONDS,
                        welcome_seconds=max(HANDSHAKE_SECONDS, node.options.lease),
                    )
                except coordinator_link.ATTEMPT_ERRORS as error:
                    why = coordinator_link.reason(error)
                    if isinstance(error, asyncio.TimeoutError):
                        break  # the machine is gone: the other ports would not answer either
                except RendezvousError as error:  # it has not noticed the end of the last link yet
                    why = error.message
            await asyncio.sleep(pause)
            pause = min(_MAX_PAUSE, pause * 1.5)

    attempts = [
        asyncio.create_task(join_at(address)) for address in dict.fromkeys(search.addresses)
    ]
    try:
        while not ended():
            moment = time.monotonic()
            if moment >= search.turn:
                return None
            if moment >= search.deadline:
                raise RendezvousError(
                    f"no coordinator came back within {moment - begin:.0f} s: {why}"
                )
            left = min(_CHECK_INTERVAL, search.turn - moment, search.deadline - moment)
            done, _ = await asyncio.wait(
                attempts, timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            for attempt in done:
                attempts.remove(attempt)
                return RemoteLink(attempt.result(), node.options)
        return None
    finally:
        await _stop(attempts)


async def _stop(attempts: Sequence[asyncio.Task[Channel]]) -> None:
    """End all attempts: one that went on would join a coordinator that starts in this process.

    Before Python 3.12, asyncio.wait_for loses a cancellation that arrives with its result.
    """
    while running := [attempt for attempt in attempts if not attempt.done()]:
        for attempt in running:
            attempt.cancel()
        await asyncio.wait(running, timeout=_FIRST_PAUSE)
    for attempt in attempts:
        if not attempt.cancelled() and attempt.exception() is None:
            await attempt.result().close()
