"""Workers that still run long after the others have succeeded: named once, for a script that hangs
at its end says nothing itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from clusterjob.node.environments.topology import ranks_by_node
from clusterjob.node.logs.folding import ranges

AFTER = 10.0  # seconds since the last of the others ended


class Stragglers:
    """What the lead knows of the workers that have ended with 0 in one round.

    Args:
        first_ranks: the rank of each node's first worker.
        world_size: workers of the job.

    Attributes:
        due: when those that still run are to be named, by the monotonic clock; infinity while that
            is not to be seen.
    """

    def __init__(self, first_ranks: Sequence[int] = (), world_size: int = 0) -> None:
        self._first_ranks = first_ranks
        self._world_size = world_size
        self._ended: set[int] = set()
        self.due = float("inf")

    def ended(self, node_rank: int, local_rank: int) -> None:
        """Take in that a worker has ended with 0."""
        self._ended.add(self._first_ranks[node_rank] + local_rank)
        self.due = time.monotonic() + AFTER if len(self._ended) < self._world_size else float("inf")

    def name(self) -> tuple[str, dict[int, list[int]]]:
        """Return one line on those that still run, and which they are, by their nodes."""
        self.due = float("inf")
        running = sorted(set(range(self._world_size)) - self._ended)
        still = f"{_ranks(running)} still run{'s' if len(running) == 1 else ''}"
        return f"{still}; {_ranks(sorted(self._ended))} ended {AFTER:.0f} s ago", ranks_by_node(
            self._first_ranks, running
        )


def _ranks(numbers: list[int]) -> str:
    return f"rank{'' if len(numbers) == 1 else 's'} {', '.join(ranges(numbers))}"
