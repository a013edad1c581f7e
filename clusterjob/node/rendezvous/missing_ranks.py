"""Workers for which others wait at the roll-call of a process group: whom to ask, and whom to blame
once the others give up.
"""

from __future__ import annotations

from collections.abc import Sequence

from clusterjob.node.environments.topology import ranks_by_node
from clusterjob.node.rendezvous.protocol import Message
from clusterjob.node.verdict import Failure, is_roll_call_end

# Seconds for which a verdict waits for the agents' answers: `stacks.ANSWER_SECONDS`, and their way.
PATIENCE = 3.0


class Search:
    """What the lead knows of missing workers in one round.

    Args:
        first_ranks: the rank of each node's first worker.
        world_size: workers of the job.
    """

    def __init__(self, first_ranks: Sequence[int] = (), world_size: int = 0) -> None:
        self._first_ranks = first_ranks
        self._world_size = world_size
        self._asker: tuple[int, int] | None = None
        self._open: set[int] = set()  # nodes that have not answered the final question
        self._stuck: list[Failure] = []
        self._given_up = False

    def ask(self, node_rank: int, question: Message) -> dict[int, list[int]]:
        """Return whom to ask: the missing ranks by their nodes.

        Args:
            node_rank: the node of the worker that waits.
            question: its words.
        """
        by_node = ranks_by_node(
            self._first_ranks, (rank for rank in question["ranks"] if rank < self._world_size)
        )
        self._asker = node_rank, int(question["local_rank"])
        if question["final"]:
            self._open = set(by_node)
            self._stuck.clear()
        return by_node

    def answer(self, node_rank: int, answer: Message) -> tuple[int, Message] | None:
        """Take in what an agent answers; return what to tell which node, for the log of the worker
        that waits.

        None once that has given up: its last words are its own, and the verdict says the rest.
        """
        if answer["final"]:
            self._open.discard(node_rank)
            self._stuck += [Failure.from_json(failure) for failure in answer["failures"]]
        if self._asker is None or answer["final"]:
            return None
        return self._asker[0], {
            "t": "found",
            "local_rank": self._asker[1],
            "lines": answer["lines"],
        }

    @property
    def answered(self) -> bool:
        """Whether nobody's answer to the final question is missing."""
        return not self._open

    def note(self, failure: Failure) -> None:
        """Take in a failure: one that tells of the end of a roll-call makes those who were missing
        its cause.
        """
        self._given_up |= is_roll_call_end(failure)

    def causes(self) -> list[Failure]:
        """Return whom the others gave up waiting for, once: empty while nobody has failed of it, as
        a script may try again.
        """
        if not self._given_up:
            return []
        stuck, self._stuck = self._stuck, []
        return stuck
