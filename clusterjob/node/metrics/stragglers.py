"""Find ranks that others wait for, from the time that each rank waits in collectives.

All ranks leave a collective together, and the last one to enter it has not waited. So the wait of a
straggler is shorter than that of the others by the time that it costs them in each step. What the
communication itself takes is in the waits of all ranks. No clocks are compared.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from clusterjob.node.logs.events import CAUGHT_UP, STRAGGLING, EventLog

_INTERVAL, _PER_SECOND = 5.0, 200
SHARE = 0.1  # of a step: a rank for which the others wait longer is a straggler
_LEAST = 0.002  # seconds per step
_KEPT, _KEPT_STEPS = 30.0, 3  # a wait counts for so many seconds, and so many steps
_SIMILAR = 0.5  # ranks whose step differs by a larger share from the median do not take part
_IN_A_ROW = 3  # measurements after which a rank is a straggler, or is none any more
_MAX_NAMED = 64  # stragglers at the same time


def interval(nnodes: int) -> float:
    """Return the seconds between two messages of an agent: the coordinator gets 200 per second."""
    return max(_INTERVAL, nnodes / _PER_SECOND)


@dataclass(frozen=True)
class Wait:
    """The means of the last steps of one rank, in seconds.

    Attributes:
        step: the length of a step.
        waited: the wait in collectives in a step; in a result of `compare`, how long the others
            wait for the rank.
    """

    step: float
    waited: float

    def is_fresh(self, age: float) -> bool:
        """Return whether a wait that arrived `age` seconds ago still tells about the rank."""
        return age < _KEPT + _KEPT_STEPS * self.step

    @property
    def is_long(self) -> bool:
        """Whether it is a large enough share of a step, and long enough to tell."""
        return self.waited >= max(SHARE * self.step, _LEAST)


def compare(waits: Mapping[int, Wait]) -> dict[int, Wait]:
    """Return how long at least half of the ranks wait for each rank; at least 0 s.

    Args:
        waits: the ranks with a measurement.
    """
    from statistics import median, median_high  # slow to import; a job of one rank needs none

    if len(waits) < 2:
        return {}
    step = median(wait.step for wait in waits.values())
    own = {
        rank: min(wait.waited, step)
        for rank, wait in waits.items()
        if abs(wait.step - step) <= _SIMILAR * step
    }
    if len(own) < 2 or step <= 0:
        return {}
    # A rank that does not tell the truth changes a median little.
    usual = median_high(own.values())
    return {rank: Wait(step, max(0.0, usual - waited)) for rank, waited in own.items()}


class StragglerWatch:
    """The stragglers of one round.

    Args:
        restart: the number of the round, from 0.
        nnodes: the number of nodes with workers.
        world_size: the number of ranks.
        events: the job's events.
    """

    def __init__(self, restart: int, nnodes: int, world_size: int, events: EventLog) -> None:
        self._restart = restart
        self._interval = interval(nnodes)
        self._world_size = world_size
        self._events = events
        # By rank: the time of arrival, the wait, node_rank and host.
        self._waits: dict[int, tuple[float, Wait, int, str]] = {}
        self._new: set[int] = set()  # ranks with a measurement since the last check
        self._checked = time.monotonic()
        # Measurements in a row in which a rank was late; below 0, in which it was not.
        self._row: Counter[int] = Counter()
        self._named: set[int] = set()  # ranks whose last event does not say that they caught up

    def receive(self, node_rank: int, host: str, waits: Mapping[int, Wait]) -> None:
        """Record the waits of one node's ranks, by rank; check all ranks from time to time."""
        moment = time.monotonic()
        for rank, wait in waits.items():
            self._waits[rank] = moment, wait, node_rank, host
        self._new.update(waits)
        # Waits of the same time are compared; a rank with long steps is not waited for.
        since = moment - self._checked
        complete = len(self._new) == self._world_size
        if since >= (self._interval if complete else 2 * self._interval):
            self._checked = moment
            self._check(moment)

    def _check(self, moment: float) -> None:
        fresh = {
            rank: wait
            for rank, (at, wait, *_) in self._waits.items()
            if wait.is_fresh(moment - at - self._interval)
        }
        if 2 * len(fresh) < self._world_size:
            return
        late = {rank: wait for rank, wait in compare(fresh).items() if wait.is_long}
        for rank in sorted(late.keys() & self._new, key=lambda rank: -late[rank].waited):
            self._row[rank] = max(0, self._row[rank]) + 1
            if self._row[rank] >= _IN_A_ROW:
                self._tell(rank, late[rank])
        for rank in self._new - late.keys():
            self._row[rank] = min(0, self._row[rank]) - 1
            if self._row[rank] <= -_IN_A_ROW and rank in self._named:
                self._named.discard(rank)
                self._events.add(CAUGHT_UP, restart=self._restart, rank=rank)
        self._new.clear()

    def _tell(self, rank: int, late: Wait) -> None:
        if rank in self._named or len(self._named) >= _MAX_NAMED:
            return
        self._named.add(rank)
        _, _, node_rank, host = self._waits[rank]
        self._events.add(
            STRAGGLING,
            restart=self._restart,
            rank=rank,
            node_rank=node_rank,
            host=host,
            waited_s=round(late.waited, 4),
            step_s=round(late.step, 4),
        )
