"""Add events when the ranks import torch, join and form the process group."""

from __future__ import annotations

from clusterjob.node.logs.events import EventLog
from clusterjob.node.rendezvous import messages
from clusterjob.node.rendezvous.membership import Peer

_EACH = 16  # maximum size of a world of which each change gets an event
_MAX_IMPORTS = 4  # maximum events that say that ranks import torch


class RankCounter:
    """Add the event ``ranks`` for some of the counts that the agents send.

    In a large world, a count gets an event if it has doubled, or if the number of missing ranks has
    halved: at most 48 events for 4,096 ranks.

    Args:
        restart: the number of the round, from 0.
        world_size: the number of ranks.
        events: the job's events.
    """

    def __init__(self, restart: int, world_size: int, events: EventLog) -> None:
        self._restart = restart
        self._world_size = world_size
        self._events = events
        self._counts: dict[int, tuple[int, int]] = {}  # by node_rank
        self._totals = (0, 0)
        self._written = (0, 0)
        self._importing: set[int] = set()  # node_ranks
        self._imports = 0

    def receive(self, peer: Peer, message: messages.RankCounts) -> None:
        """Take the counts of one node; they only grow, so that they give few events."""
        if self._world_size and message.restart == self._restart:
            self._receive_import(peer, importing=message.importing)
            before = self._counts.get(peer.node_rank, (0, 0))
            joined = max(before[0], min(message.joined, peer.nproc))
            formed = max(before[1], min(message.formed, joined))
            self._counts[peer.node_rank] = joined, formed
            of_all = self._totals
            self._totals = of_all[0] + joined - before[0], of_all[1] + formed - before[1]
            pairs = zip(self._written, self._totals, strict=True)
            if any(self._is_step(old, new) for old, new in pairs):
                self.write()

    def _receive_import(self, peer: Peer, *, importing: bool) -> None:
        """Add the event ``importing`` if the first rank imports torch, or none does any more."""
        before = bool(self._importing)
        (self._importing.add if importing else self._importing.discard)(peer.node_rank)
        after = bool(self._importing)
        if after is not before:
            self._imports += after
            if self._imports <= _MAX_IMPORTS:
                self._events.add("importing", restart=self._restart, torch=after)

    def write(self) -> None:
        """Add an event with the current counts, unless the last event has them."""
        totals = self._totals
        if totals != self._written:
            self._written = totals
            self._events.add(
                "ranks",
                restart=self._restart,
                joined=totals[0],
                formed=totals[1],
                world_size=self._world_size,
            )

    def _is_step(self, old: int, new: int) -> bool:
        if self._world_size <= _EACH:
            return new != old
        missing = self._world_size - new
        return new > old and (new >= 2 * old or 2 * missing <= self._world_size - old)
