"""Watch for ranks that the others wait for in collectives, and add them to the events."""

from __future__ import annotations

import time
from collections import Counter

from clusterjob.node.logs.events import CAUGHT_UP, STRAGGLING, EventLog, Straggler
from clusterjob.node.metrics import stragglers
from clusterjob.node.metrics.stragglers import Lateness, Wait
from clusterjob.node.rendezvous import messages
from clusterjob.node.rendezvous.membership import Peer
from clusterjob.node.rendezvous.rank_map import RankMap

_IN_A_ROW = 3  # measurements after which a rank is a straggler, or is none any more
_AGAIN = 600.0  # seconds between two events about the same rank
_MAX_NAMED = 64  # stragglers at the same time


class StragglerWatch:
    """The stragglers of one round.

    Args:
        restart: the number of the round, from 0.
        ranks: the ranks of each node.
        events: the job's events.
    """

    def __init__(self, restart: int, ranks: RankMap, events: EventLog) -> None:
        self._restart = restart
        self._ranks = ranks
        self._interval = stragglers.interval(ranks.nodes)
        self._world_size = ranks.world_size
        self._events = events
        self._peers: dict[int, Peer] = {}  # by rank
        self._waits: dict[int, tuple[float, Wait]] = {}  # by rank, with the time of arrival
        self._new: set[int] = set()  # ranks with a measurement since the last check
        self._checked = time.monotonic()
        self._late: Counter[int] = Counter()  # measurements in a row in which a rank was late
        self._even: Counter[int] = Counter()  # and in which a straggler was not
        self._stragglers: set[int] = set()
        self._told: dict[int, float] = {}  # the time of the last event about a rank
        self._named: set[int] = set()  # ranks whose last event does not say that they caught up

    def receive(self, peer: Peer, message: messages.RankWaits) -> None:
        """Record the waits of one node's ranks; check all ranks from time to time."""
        if not self._world_size or message.restart != self._restart:
            return
        moment = time.monotonic()
        for each in message.ranks:
            if each.local_rank < peer.nproc:
                rank = self._ranks.rank(peer.node_rank, each.local_rank)
                self._peers[rank] = peer
                self._waits[rank] = moment, Wait(each.step, each.waited)
                self._new.add(rank)
        # Waits of the same time are compared; a rank with long steps is not waited for.
        since = moment - self._checked
        complete = len(self._new) == self._world_size
        if since >= (self._interval if complete else 2 * self._interval):
            self._checked = moment
            self._check(moment)

    def _check(self, moment: float) -> None:
        fresh = {
            rank: wait
            for rank, (at, wait) in self._waits.items()
            if wait.is_fresh(moment - at - self._interval)
        }
        if 2 * len(fresh) < self._world_size:
            return
        measured = stragglers.compare(fresh)
        late = {rank: each for rank, each in measured.items() if each.reaches(stragglers.SHARE)}
        for rank in self._new:
            each = measured.get(rank)
            even = each is None or not each.reaches(stragglers.SHARE / 2)
            self._count(rank, late=rank in late, even=even)
        self._new.clear()
        for rank in sorted(late, key=lambda rank: -late[rank].waited):
            known = rank in self._stragglers or len(self._stragglers) < _MAX_NAMED
            if self._late[rank] >= _IN_A_ROW and known:
                self._stragglers.add(rank)
                self._tell(rank, late[rank], moment)

    def _count(self, rank: int, *, late: bool, even: bool) -> None:
        if late:
            self._late[rank] += 1
        elif even:
            del self._late[rank]
        if rank not in self._stragglers or not even:
            del self._even[rank]
            return
        self._even[rank] += 1
        if self._even[rank] >= _IN_A_ROW:
            self._stragglers.discard(rank)
            del self._even[rank]
            if rank in self._named:
                self._named.discard(rank)
                self._events.add(CAUGHT_UP, restart=self._restart, rank=rank)

    def _tell(self, rank: int, lateness: Lateness, moment: float) -> None:
        if moment - self._told.get(rank, float("-inf")) < _AGAIN:
            return
        self._told[rank] = moment
        self._named.add(rank)
        peer = self._peers[rank]
        found = Straggler(
            rank, peer.node_rank, peer.host, waited=lateness.waited, step=lateness.step
        )
        self._events.add(STRAGGLING, restart=self._restart, **found.to_event())
