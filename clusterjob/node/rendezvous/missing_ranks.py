"""Find ranks that have not joined a process group, and report them when the others give up."""

from __future__ import annotations

from collections.abc import Sequence

from clusterjob.node.environments.topology import ranks_by_node
from clusterjob.node.rendezvous import messages
from clusterjob.node.verdict import Failure, FailureKind


class MissingRanks:
    """The ranks of one round for which other ranks wait.

    Args:
        first_ranks: the rank of each node's first worker.
        world_size: workers of the job.
    """

    def __init__(self, first_ranks: Sequence[int] = (), world_size: int = 0) -> None:
        self._first_ranks = first_ranks
        self._world_size = world_size
        self._waiting: tuple[int, int] | None = None  # node_rank and local rank that asked
        self._unanswered: set[int] = set()  # nodes still to answer after a rank gave up
        self._stuck: list[Failure] = []
        self._gave_up = False

    def ask(self, node_rank: int, question: messages.RanksMissing) -> dict[int, list[int]]:
        """Return the missing ranks, grouped by their node, whose agent must be asked.

        Args:
            node_rank: the node of the worker that waits.
            question: the message of that worker.
        """
        known = (rank for rank in question.ranks if rank < self._world_size)
        by_node = ranks_by_node(self._first_ranks, known)
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
