"""Find ranks that others wait for, from the time that each rank waits in collectives.

All ranks leave a collective together, and the last one to enter it has not waited. So the wait of a
straggler is shorter than that of the others by the time that it costs them in each step. What the
communication itself takes is in the waits of all ranks. No clocks are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median, median_high

_INTERVAL, _PER_SECOND = 5.0, 200
SHARE = 0.1  # of a step: a rank for which the others wait longer is a straggler
_LEAST = 0.002  # seconds per step
_KEPT, _KEPT_STEPS = 30.0, 3  # a wait counts for so many seconds, and so many steps
_SIMILAR = 0.5  # ranks whose step differs by a larger share from the median do not take part


def interval(nnodes: int) -> float:
    """Return the seconds between two messages of an agent: the coordinator gets 200 per second."""
    return max(_INTERVAL, nnodes / _PER_SECOND)


@dataclass(frozen=True)
class Wait:
    """The means of the last steps of one rank, in seconds.

    Attributes:
        step: the length of a step.
        waited: the wait in collectives in a step.
    """

    step: float
    waited: float

    def is_fresh(self, age: float) -> bool:
        """Return whether a wait that arrived `age` seconds ago still tells about the rank."""
        return age < _KEPT + _KEPT_STEPS * self.step


@dataclass(frozen=True)
class Lateness:
    """What one rank costs the others in each step.

    Attributes:
        waited: seconds for which the others wait for it.
        step: the length of a step in seconds.
    """

    waited: float
    step: float

    def reaches(self, share: float) -> bool:
        """Return whether the others wait for this share of a step, and long enough to tell."""
        return self.waited >= max(share * self.step, _LEAST)


def compare(waits: Mapping[int, Wait]) -> dict[int, Lateness]:
    """Return how long at least half of the ranks wait for each rank; at least 0 s.

    Args:
        waits: the ranks with a measurement.
    """
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
    return {rank: Lateness(max(0.0, usual - waited), step) for rank, waited in own.items()}
