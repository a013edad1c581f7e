"""Keep how long the workers of this node wait in collectives, and tell the coordinator."""

from __future__ import annotations

import time

from clusterjob.node.contract import World
from clusterjob.node.metrics import stragglers
from clusterjob.node.metrics.stragglers import Wait
from clusterjob.node.rendezvous import messages
from clusterjob.node.workers import forkserver_messages

_MOST = 2000  # ranks in one message


class NodeWaits:
    """The waits of one node's workers."""

    def __init__(self) -> None:
        self._world: World | None = None
        self._interval = 0.0
        # The last wait of each local rank, and the monotonic time at which it has arrived.
        self._waits: dict[int, tuple[float, Wait]] = {}
        self._new: set[int] = set()
        self._sent = 0.0

    def begin_round(self, world: World) -> None:
        """Forget the workers of the last round."""
        self._world = world
        self._interval = stragglers.interval(world.nnodes)
        self._waits = {}
        self._new.clear()

    def receive(self, message: forkserver_messages.WorkerWaits) -> None:
        """Record the message of a worker; user code can write anything into the pipe."""
        if self._world is not None and message.local_rank < self._world.nproc:
            wait = Wait(message.step, message.waited)
            self._waits[message.local_rank] = time.monotonic(), wait
            self._new.add(message.local_rank)

    def newest(self) -> dict[int, Wait]:
        """Return the waits by rank; another thread may call this."""
        world, moment = self._world, time.monotonic()
        return {
            world.first_rank + local_rank: wait
            for local_rank, (at, wait) in list(self._waits.items())
            if world is not None and wait.is_fresh(moment - at)
        }

    def due(self) -> messages.RankWaits | None:
        """Return a message with the new waits, if the last one is old enough; else None."""
        moment = time.monotonic()
        if not self._new or self._world is None or moment - self._sent < self._interval:
            return None
        chosen = sorted(self._new)[:_MOST]
        ranks = tuple(
            messages.RankWait(
                local_rank,
                step=round(self._waits[local_rank][1].step, 6),
                waited=round(self._waits[local_rank][1].waited, 6),
            )
            for local_rank in chosen
        )
        self._sent = moment
        self._new.difference_update(chosen)
        return messages.RankWaits(self._world.restart, ranks)
