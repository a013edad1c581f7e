"""Order the measures: machines work at the same time, nodes of one machine in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from clusterjob.node.preflight.measures import Probe


@dataclass(frozen=True)
class Step:
    """One measure of one node, or of several nodes together.

    Attributes:
        number: its number; steps begin in this order where they need the same machine.
        probe: what is measured.
        nodes: the nodes that take part.
    """

    number: int
    probe: Probe
    nodes: tuple[int, ...]


class Turns:
    """The steps that wait or run; no two of them use one machine at the same time.

    Args:
        steps: the steps, in order of their numbers.
        machine_of: returns the machine of a node.

    Attributes:
        running: the steps that were begun and not finished, by number, oldest first.
    """

    def __init__(self, steps: Iterable[Step], machine_of: Callable[[int], str]) -> None:
        self._machine_of = machine_of
        self._queues: dict[str, deque[Step]] = {}  # by machine
        self._busy: set[str] = set()
        self.running: dict[int, Step] = {}
        for step in steps:
            for machine in self._machines(step):
                self._queues.setdefault(machine, deque()).append(step)

    def begin(self) -> list[Step]:
        """Return the steps that can begin now, and count them as running."""
        return self._begin(self._queues)

    def finish(self, step: Step) -> list[Step]:
        """End a running step; return the steps that can begin now, and count them as running."""
        del self.running[step.number]
        self._busy -= self._machines(step)
        return self._begin(self._machines(step))

    def drop_waiting(self) -> None:
        """Drop the steps that have not begun."""
        self._queues.clear()

    def _machines(self, step: Step) -> set[str]:
        return {self._machine_of(node) for node in step.nodes}

    def _begin(self, machines: Iterable[str]) -> list[Step]:
        """Begin each step that is the first one in the queues of all its machines."""
        begun = []
        for machine in machines:
            queue = self._queues.get(machine)
            if not queue:
                continue
            needed = self._machines(step := queue[0])
            if needed & self._busy or any(self._queues[one][0] is not step for one in needed):
                continue
            for one in needed:
                self._queues[one].popleft()
            self._busy |= needed
            self.running[step.number] = step
            begun.append(step)
        return begun


def pair_rounds(nodes: Sequence[int], rounds: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs, as in a round-robin tournament: no node is twice in a round.

    Args:
        nodes: the nodes.
        rounds: the maximum number of rounds; all pairs need one less than nodes, or for an odd
            number of nodes, as many.
    """
    circle: list[int | None] = [*nodes]
    if len(circle) % 2:
        circle.append(None)  # who meets it pauses
    found = []
    for _ in range(min(rounds, len(circle) - 1)):
        half = len(circle) // 2
        met = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(a, b) for a, b in met if a is not None and b is not None])
        circle.insert(1, circle.pop())
    return found


def rings(nodes: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """Divide the nodes into rings of two to `size` nodes; a single node forms none."""
    count = -(-len(nodes) // size)
    parts = [tuple(nodes[index::count]) for index in range(count)]
    return [part for part in parts if len(part) > 1]
