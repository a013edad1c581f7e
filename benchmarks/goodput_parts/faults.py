"""The schedule of faults: the same for every launcher, from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

FIRST_SECONDS = 20.0  # seconds before the first fault: every launcher trains by then


class Kind(str, Enum):
    """A kind of fault."""

    RANK = "kill a rank"
    AGENT = "kill an agent"
    NODE = "cut off a node"
    FREEZE = "freeze a rank"
    DISK = "fill the disk"
    PREEMPT = "preempt"


# How often each kind occurs among ten faults: ranks fail most often.
WEIGHTS = {
    Kind.RANK: 3,
    Kind.AGENT: 2,
    Kind.NODE: 2,
    Kind.FREEZE: 1,
    Kind.DISK: 1,
    Kind.PREEMPT: 1,
}


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        at: seconds since the start of the job.
        kind: what happens.
        target: the number of the machine among those that run workers, from 0.
    """

    at: float
    kind: Kind
    target: int


def schedule(seed: int, seconds: float, mean: float, kinds: list[Kind], nodes: int) -> list[Fault]:
    """Return the faults of a run, in order of time.

    Args:
        seed: gives the same faults each time.
        seconds: length of the run.
        mean: mean seconds between two faults; the distances have an exponential distribution.
        kinds: the kinds that occur. They are drawn without replacement, so that none is left out.
        nodes: number of machines that run workers.
    """
    source = random.Random(seed)
    pool: list[Kind] = []
    found = []
    at = FIRST_SECONDS
    while at < seconds:
        if not pool:
            pool = [kind for kind in kinds for _ in range(WEIGHTS[kind])]
            source.shuffle(pool)
        found.append(Fault(round(at, 1), pool.pop(), source.randrange(nodes)))
        at += source.expovariate(1 / mean)
    return found
