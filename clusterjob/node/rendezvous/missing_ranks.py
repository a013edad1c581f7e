"""Name ranks that the others wait for: ranks that never joined, and ranks that still run."""

from __future__ import annotations

import time

from clusterjob.node.rendezvous import messages
from clusterjob.node.rendezvous.rank_map import RankMap
from clusterjob.node.system.ranges import ranges
from clusterjob.node.verdict import Failure, FailureKind

AFTER_SECONDS = 10.0  # seconds since the last successful worker ended


class MissingRanks:
    """The ranks of one round for which other ranks wait.

    Args:
        ranks: the ranks of each node.
    """

    def __init__(self, ranks: RankMap) -> None:
        self._ranks = ranks
        self._waiting: tuple[int, int] | None = None  # node_rank and local rank of the worker
        self._unanswered: set[int] = set()  # nodes that must still answer since a rank gave up
        self._stuck: list[Failure] = []
        self._gave_up = False

    def ask(self, node_rank: int, question: messages.RanksMissing) -> dict[int, list[int]]:
        """Return the missing ranks by node; the caller asks the agents of these nodes.

        Args:
            node_rank: the node of the worker that waits.
            question: the message of that worker.
        """
        known = (rank for rank in question.ranks if rank < self._ranks.world_size)
        by_node = self._ranks.by_node(known)
        self._waiting = node_rank, question.local_rank
        if question.final:
            self._unanswered = set(by_node)
            self._stuck.clear()
        return by_node

    def receive(
        self, node_rank: int, answer: messages.RanksProbed
    ) -> tuple[int, messages.RanksFound] | None:
        """Record a node's answer; return the node and the message for the worker that waits.

        None after that worker has given up: the verdict then reports the missing ranks.
        """
        if answer.final:
            self._unanswered.discard(node_rank)
            self._stuck += answer.failures
        if self._waiting is None or answer.final:
            return None
        return self._waiting[0], messages.RanksFound(self._waiting[1], answer.lines)

    @property
    def answered(self) -> bool:
        """Whether every node has answered since a rank gave up waiting."""
        return not self._unanswered

    def note(self, failure: Failure) -> None:
        """Record a failure of the round; `causes` depends on ranks that gave up waiting."""
        self._gave_up |= failure.kind is FailureKind.RENDEZVOUS

    def causes(self) -> list[Failure]:
        """Return the failures of the ranks for which others gave up waiting, each only once.

        The list is empty until a rank that gave up has failed: a script may catch the error and
        try again.
        """
        if not self._gave_up:
            return []
        stuck, self._stuck = self._stuck, []
        return stuck


class Unfinished:
    """The workers of one round that still run 10 s after the others succeeded; they may hang.

    Args:
        ranks: the ranks of each node.

    Attributes:
        due: the monotonic time at which to name the workers that still run; infinity while none
            has ended, or all have.
    """

    def __init__(self, ranks: RankMap) -> None:
        self._ranks = ranks
        self._ended: set[int] = set()
        self.due = float("inf")

    def ended(self, node_rank: int, local_rank: int) -> None:
        """Record that a worker has ended with exit code 0."""
        self._ended.add(self._ranks.rank(node_rank, local_rank))
        left = len(self._ended) < self._ranks.world_size
        self.due = time.monotonic() + AFTER_SECONDS if left else float("inf")

    def name(self) -> tuple[str, dict[int, list[int]]]:
        """Return one line about the workers that still run, and their ranks by node_rank."""
        self.due = float("inf")
        running = sorted(set(range(self._ranks.world_size)) - self._ended)
        still = f"{_ranks(running)} still run{'s' if len(running) == 1 else ''}"
        ended = f"{_ranks(sorted(self._ended))} ended {AFTER_SECONDS:.0f} s ago"
        return f"{still}; {ended}", self._ranks.by_node(running)


def _ranks(numbers: list[int]) -> str:
    return f"rank{'' if len(numbers) == 1 else 's'} {', '.join(ranges(numbers))}"
