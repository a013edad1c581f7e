"""Measure how long this process itself did not run, before it reports a silent peer as lost.

A process that was stopped or suspended, or that got no CPU, received and sent nothing meanwhile.
CLOCK_BOOTTIME also counts the time for which the machine is suspended; CLOCK_MONOTONIC does not
(clock_gettime(2)).
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Stalls:
    """Measure for how long a process did not run; the process must call `tick` regularly.

    Args:
        interval: seconds between two calls; a call that is more than one interval late ends
            a stall.
        clock: seconds that also pass while the machine is suspended.

    Attributes:
        total: seconds of all stalls so far.
        last: seconds of the latest stall.
    """

    def __init__(
        self,
        interval: float,
        clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self.total = self.last = 0.0
        self._interval = interval
        self._clock = clock
        self._ticked = clock()
        self._ended = float("-inf")

    def tick(self) -> float:
        """Record that this process runs; return the seconds of a stall that ends now, else 0."""
        moment = self._clock()
        elapsed, self._ticked = moment - self._ticked, moment
        if elapsed <= 2 * self._interval:
            return 0.0
        self.last, self._ended = elapsed, moment
        self.total += elapsed
        return elapsed

    def recent(self, seconds: float) -> float:
        """Return the seconds of the latest stall if it ended within the last `seconds`, else 0."""
        self.tick()
        return self.last if self._clock() - self._ended <= seconds else 0.0
