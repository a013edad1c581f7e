"""Find the node of a rank in one round: a node keeps its number, its ranks may change."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping

from clusterjob.node.contract import World


class RankMap:
    """The ranks of each node in one round.

    Args:
        first_ranks: the rank of each node's first worker, by the node's number.
        world_size: workers of the job.
    """

    def __init__(self, first_ranks: Mapping[int, int], world_size: int) -> None:
        self.world_size = world_size
        self._first_ranks = first_ranks
        self._nodes = sorted(first_ranks, key=lambda node: first_ranks[node])
        self._starts = [first_ranks[node] for node in self._nodes]

    @classmethod
    def of(cls, worlds: Mapping[int, World]) -> RankMap:
        """Return the map of a round; empty before the first round.

        Args:
            worlds: the world of each node, by the node's number.
        """
        working = {node: world for node, world in worlds.items() if world.nproc}
        size = max((world.world_size for world in working.values()), default=0)
        return cls({node: world.first_rank for node, world in working.items()}, size)

    @property
    def nodes(self) -> int:
        """The number of nodes with workers."""
        return len(self._nodes)

    def by_node(self, ranks: Iterable[int]) -> dict[int, list[int]]:
        """Return the given ranks, each below the world size, grouped by node."""
        found: dict[int, list[int]] = {}
        for rank in ranks:
            node = self._nodes[bisect_right(self._starts, rank) - 1]
            found.setdefault(node, []).append(rank)
        return found

    def rank(self, node: int, local_rank: int) -> int:
        """Return the rank of a worker."""
        return self._first_ranks[node] + local_rank

    def local_rank(self, node: int, rank: int) -> int:
        """Return the index of a rank on its node; -1 if the node has no workers."""
        return rank - self._first_ranks[node] if node in self._first_ranks else -1
