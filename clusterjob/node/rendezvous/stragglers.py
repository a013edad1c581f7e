"""Name workers that still run 10 s after the others succeeded; they may hang."""

from __future__ import annotations

import time
from collections.abc import Sequence

from clusterjob.node.environments.topology import ranks_by_node
from clusterjob.node.logs.folding import ranges

AFTER_SECONDS = 10.0  # since the last of the other workers ended


class Stragglers:
    """The workers of one round that have ended with exit code 0.

    Args:
        first_ranks: the rank of each node's first worker.
        world_size: workers of the job.

    Attributes:
        due: the monotonic time at which to name the workers that still run; infinity while none
            has ended, or all have.
    """

    def __init__(self, first_ranks: Sequence[int] = (), world_size: int = 0) -> None:
        self._first_ranks = first_ranks
        self._world_size = world_size
        self._ended: set[int] = set()
        self.due = float("inf")

    def ended(self, node_rank: int, local_rank: int) -> None:
        """Record that a worker has ended with exit code 0."""
        self._ended.add(self._first_ranks[node_rank] + local_rank)
        all_ended = len(self._ended) >= self._world_size
        self.due = float("inf") if all_ended else time.monotonic() + AFTER_SECONDS

    def name(self) -> tuple[str, dict[int, list[int]]]:
        """Return one line about the workers that still run, and their ranks by node_rank."""
        self.due = float("inf")
        running = sorted(set(range(self._world_size)) - self._ended)
        still = f"{_ranks(running)} still run{'s' if len(running) == 1 else ''}"
        text = f"{still}; {_ranks(sorted(self._ended))} ended {AFTER_SECONDS:.0f} s ago"
        return text, ranks_by_node(self._first_ranks, running)


def _ranks(numbers: list[int]) -> str:
    return f"rank{'' if len(numbers) == 1 else 's'} {', '.join(ranges(numbers))}"
