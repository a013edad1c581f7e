"""Measure how long this process itself did not run, before it blames a peer for a silence.

A process that was stopped, whose machine was suspended, or that got no CPU has heard nobody
meanwhile, and nobody has heard it. CLOCK_BOOTTIME goes on while a machine is suspended;
CLOCK_MONOTONIC does not (clock_gettime(2)).
"""

from __future__ import annotations

import time
from collections.abc import Callable


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Stalls:
    """The times for which a process that ticks regularly did not run.

    Args:
        interval: seconds between two ticks; a tick that is late by more than one more interval ends
            a stall.
        clock: seconds that pass whatever this process and its machine do.

    Attributes:
        total: seconds of all stalls so far.
        last: seconds of the latest one.
    """

    def __init__(self, interval: float, clock: Callable[[], float] = _boottime) -> None:
        self.total = 0.0
        self.last = 0.0
        self._interval = interval
        self._clock = clock
        self._ticked = clock()
        self._ended = float("-inf")

    def tick(self) -> float:
        """Note that this process runs; return the seconds of a stall that ends now, else 0."""
        moment = self._clock()
        elapsed, self._ticked = moment - self._ticked, moment
        if elapsed <= 2 * self._interval:
            return 0.0
        self.last, self._ended = elapsed, moment
        self.total += elapsed
        return elapsed

    def recent(self, seconds: float) -> float:
        """Return the length of the latest stall if it ended at most so many seconds ago, else 0."""
        self.tick()
        return self.last if self._clock() - self._ended <= seconds else 0.0
