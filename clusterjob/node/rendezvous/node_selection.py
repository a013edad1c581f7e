"""Choose the nodes of each round: replace lost and avoided nodes by spare ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection


class NodeSelection:
    """The nodes that run workers, in the order of their ranks, from round to round.

    A node that stays usable keeps its place, so its ranks are the same in the next round.

    Args:
        wanted: the number of nodes of a round, if there are enough.
        least: the smallest number of nodes that a round may have.

    Attributes:
        nodes: the nodes of the last round; before the first one, the nodes 0 to wanted - 1.
        avoided: the nodes that caused a failure, the latest last. They are only used if there
            would be fewer than `least` nodes without them.
    """

    def __init__(self, wanted: int, least: int) -> None:
        self.wanted = wanted
        self.least = least
        self.nodes: list[int] = list(range(wanted))
        self.avoided: list[int] = []

    def choose(self, usable: Collection[int]) -> list[int]:
        """Return the nodes for a round, in the order of their ranks.

        There are fewer than `least` if fewer are usable.

        Args:
            usable: the nodes whose agents have joined and are alive.
        """
        there, avoided = set(usable), set(self.avoided)  # sets: a job may have 10,000 nodes
        good = [node for node in sorted(there) if node not in avoided]
        for node in self.avoided:
            if len(good) < self.least and node in there:
                good.append(node)
        kept = set(self.nodes[: self.wanted]).intersection(good)
        others = deque(node for node in good if node not in kept)
        chosen = []
        for node in self.nodes[: self.wanted]:
            if node in kept:
                chosen.append(node)
            elif others:  # another node takes the place of a lost one
                chosen.append(others.popleft())
        return chosen + list(others)[: self.wanted - len(chosen)]

    def avoid(self, node: int) -> None:
        """Use a node only if there would be too few without it."""
        if node in self.avoided:
            self.avoided.remove(node)
        self.avoided.append(node)

    def pardon(self, nodes: Collection[int]) -> None:
        """Use nodes like others again."""
        self.avoided = [node for node in self.avoided if node not in nodes]

    def complete(self, usable: Collection[int]) -> bool:
        """Return whether the wanted number of nodes is usable, without avoided ones."""
        return len(set(usable).difference(self.avoided)) >= self.wanted
