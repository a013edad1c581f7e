"""Collect the stacks of the living ranks before a round is stopped, and save them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterjob.node.logs.events import EventLog
from clusterjob.node.rendezvous import stack_messages
from clusterjob.node.rendezvous.membership import Membership, Peer
from clusterjob.node.stacks import grouping
from clusterjob.node.stacks.grouping import RankStack
from clusterjob.node.system.sanitize import sanitize

# Nodes to ask after a failure, whose stop must not wait for thousands of answers.
MOST_NODES = 128


class Evidence:
    """The stacks of the ranks of one round.

    Args:
        round_: the round, whose node is node 0.
        membership: the agents.
        job_dir: the job's directory.
        events: the job's events.
        local_rank: returns the index on its node of a rank, given the node_rank and the rank.

    Attributes:
        stacks: the stacks that have arrived, in order of ranks.
        path: the text file, relative to the job directory; empty if there is none.
        handlers: the function for each answer of an agent.
    """

    def __init__(
        self,
        round_: grouping.Round,
        membership: Membership,
        job_dir: Path,
        events: EventLog,
        local_rank: Callable[[int, int], int],
    ) -> None:
        self._round = round_
        self._membership = membership
        self._job_dir = job_dir
        self._events = events
        self._local_rank = local_rank
        self._unanswered: set[int] = set()
        self._stacks: dict[int, RankStack] = {}
        self._dumps: list[str] = []
        self._why = ""
        self._asked_at = 0.0
        self.path = ""
        self.handlers: dict[type, Callable[[Peer, Any], None]] = {
            stack_messages.StackFound: self._on_stack_found,
            stack_messages.StacksCollected: self._on_stacks_collected,
        }

    @property
    def stacks(self) -> list[RankStack]:
        """The stacks that have arrived, in order of ranks."""
        return [self._stacks[rank] for rank in sorted(self._stacks)]

    def expect(self, nodes: Collection[int], why: str, living: int) -> None:
        """Expect the answers of agents that were asked.

        Args:
            nodes: the nodes that were asked.
            why: why the round is stopped.
            living: the number of nodes whose workers have not all ended.
        """
        self._why, self._asked_at, self._unanswered = why, time.monotonic(), set(nodes)
        if len(nodes) < living:
            self._why += f" (stacks of {len(nodes)} of {living} nodes)"

    def save(self) -> None:
        """Write the files, unless every rank has ended."""
        if not self._stacks:
            return
        silent = [
            f"node {rank} on {self._membership.peers[rank].host}"
            for rank in sorted(self._unanswered)
        ]
        try:
            self.path = grouping.write_evidence(
                self._job_dir,
                self._round,
                self.stacks,
                why=self._why,
                silent=silent,
                dumps=self._dumps,
            )
        except OSError as error:
            self._events.add("evidence", why=self._why, error=error.strerror)
            return
        self._events.add(
            "evidence",
            why=self._why,
            path=self.path,
            ranks=len(self._stacks),
            seconds=round(time.monotonic() - self._asked_at, 3),
        )

    def _on_stack_found(self, peer: Peer, message: stack_messages.StackFound) -> None:
        """Keep the stacks of a rank; a node answers once, for its own ranks."""
        rank = message.stack.rank
        if (
            self._is_answer(peer, message.restart)
            and 0 <= self._local_rank(peer.node_rank, rank) < peer.nproc
        ):
            self._stacks[rank] = replace(message.stack, host=peer.host)

    def _on_stacks_collected(self, peer: Peer, message: stack_messages.StacksCollected) -> None:
        if self._is_answer(peer, message.restart):
            self._unanswered.discard(peer.node_rank)
            self._dumps += map(sanitize, message.dumps)

    def _is_answer(self, peer: Peer, restart: int) -> bool:
        return peer.node_rank in self._unanswered and restart == self._round.restart
