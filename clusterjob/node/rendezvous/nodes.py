"""The nodes of a job: which are alive, lost or avoided, and which run the next round."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from clusterjob.errors import RendezvousError
from clusterjob.node.environments import scheduler, slurm_env
from clusterjob.node.logs import failure_texts
from clusterjob.node.logs.events import EventLog
from clusterjob.node.rendezvous import messages, outcome
from clusterjob.node.rendezvous.identity import NodeJob
from clusterjob.node.rendezvous.membership import Membership, Peer
from clusterjob.node.rendezvous.node_selection import NodeSelection
from clusterjob.node.rendezvous.node_wait import NodeWait
from clusterjob.node.rendezvous.succession import (
    Earlier,
    Members,
    groups,
    may_go_on,
    may_move,
    slurm_says_down,
)
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import Failure, FailureKind


class MinorityError(RendezvousError):
    """More than half of the nodes of a job may run without this coordinator."""


class Nodes:
    """The nodes of a job.

    If the network splits a job, only one part may go on (`succession.may_go_on`).

    Args:
        membership: the agents that have joined.
        node: this node and its job.
        own: the coordinator's node.
        events: the job's events.

    Attributes:
        selection: chooses the nodes of the next round.
        groups: the members of the last round that all its nodes have seen, then those of the
            current round, if that is another one; empty before the first.
    """

    def __init__(
        self,
        membership: Membership,
        node: NodeJob,
        own: int,
        events: EventLog,
    ) -> None:
        options = node.options
        self._membership = membership
        self._node = node
        self._options = options
        self._nnodes = node.topology.nnodes
        self._own = own
        self._events = events
        self._print_line = node.print_line
        wanted = max(1, self._nnodes - options.spares)
        self.selection = NodeSelection(wanted, least=min(options.min_nodes or wanted, wanted))
        self.groups: list[Members] = []
        self._splits = may_move(node)
        self._rounds = 0  # the number of the current round, plus 1
        self._seen: set[int] = set()  # the members that have seen it
        self._gone: frozenset[int] = frozenset()  # nodes that have certainly ended
        self._took_over = False
        self._ended: set[int] = set()  # nodes whose agent has ended since the last round began
        self._losses: Counter[int] = Counter()
        self._full_disks: set[int] = set()  # nodes on which a disk was full or broken

    def take_over(self, earlier: Earlier) -> None:
        """Go on after an earlier coordinator."""
        self.groups, self._gone = groups(earlier.state), earlier.gone
        self._rounds = earlier.state.restarts + 1
        self._took_over = True
        self.selection.nodes = list(earlier.state.nodes)
        self.selection.avoided = list(earlier.state.avoided)
        self._full_disks = {
            each.node
            for each in earlier.rounds
            if each.node is not None
            and (each.attempt, each.kind) == (earlier.state.attempt, FailureKind.DISK)
        }
        if earlier.moved and earlier.ended:
            self._ended.add(earlier.state.node)

    def is_alone(self) -> bool:
        """Return whether the other nodes may be with another coordinator.

        Two agents may go on as the coordinator at once: one whose predecessor was killed, and a
        successor.
        """
        few = len(self.selection.choose(self._membership.usable())) < self.selection.least
        return not self.has_majority() or (self._took_over and few)

    def has_majority(self) -> bool:
        """Return whether no other part of a split job can go on."""
        return not self._splits or may_go_on(self.groups, self._present(), self._gone)

    async def may_start(self) -> bool:
        """Return whether no other part of the job may begin a round; this may take seconds.

        Slurm may confirm to the other half of a split job that this node is lost. So this half goes
        on only if Slurm answers, and says that it is not.
        """
        asks = self._splits and self._node.topology.source == slurm_env.SOURCE
        if not asks or shutil.which("scontrol") is None:  # then no other node can ask either
            return True
        tied = [replace(group, coordinator=-1) for group in self.groups]
        if may_go_on(tied, self._present(), self._gone):
            return True
        return await asyncio.to_thread(slurm_says_down, scheduler.node_name()) is False

    def _present(self) -> set[int]:
        """Return the nodes that are here, and have seen no newer round."""
        peers = self._membership.peers.values()
        return {
            peer.node_rank for peer in peers if not peer.lost and 0 < peer.rounds <= self._rounds
        }

    def wait(self, *, first: bool) -> NodeWait:
        """Return the wait for the nodes of the next round."""
        return NodeWait(
            self._membership,
            self.selection,
            options=self._options,
            nnodes=self._nnodes,
            first=first,
            majority=self.has_majority,
            alone=self.is_alone,
            events=self._events,
            print_line=self._print_line,
        )

    def choose(self, restart: int) -> list[int]:
        """Begin a round; return its nodes in the order of their ranks."""
        usable = self._membership.usable()
        self.groups = [*self.groups[:1], Members(frozenset(usable), self._own)]
        self._rounds, self._gone, self._took_over = restart + 1, frozenset(), False
        self._seen.clear()
        self._ended.clear()
        for node in usable:
            # It is a part of the job even before it says that it has seen the round.
            peer = self._membership.peers[node]
            peer.rounds = min(max(1, peer.rounds), self._rounds)
        self.selection.nodes = self.selection.choose(usable)
        return self.selection.nodes

    def note_seen(self, peer: Peer, rounds: int) -> bool:
        """Record what a node has seen; return whether now all members have seen the round."""
        peer.rounds = rounds
        if rounds != self._rounds or peer.node_rank not in self.groups[-1].nodes:
            return False
        self._seen.add(peer.node_rank)
        if len(self.groups) == 1 or len(self._seen) < len(self.groups[-1].nodes):
            return False
        del self.groups[0]
        return True

    def lose(
        self, peer: Peer, message: messages.CoordinatorLost | messages.ConnectionLost
    ) -> Failure:
        """Record that an agent is lost, or has lost the coordinator; return the failure."""
        why = sanitize(message.why)
        failure = outcome.node_loss(
            peer,
            self._membership.peers[self._own],
            why=why,
            by_agent=isinstance(message, messages.CoordinatorLost),
            stalled=self._membership.stalls.recent(self._options.lease),
        )
        self._membership.lose(peer, failure)
        self._losses[peer.node_rank] += 1
        if isinstance(message, messages.ConnectionLost) and message.ended:
            self._ended.add(peer.node_rank)
        self._events.add("lost", node_rank=peer.node_rank, host=peer.host, why=why)
        return failure

    def avoid(self, failure: Failure) -> None:
        """Leave the node of a failure out of the next rounds, if there are enough others.

        A lost node may come back once. If a disk fails on a second node, it is a shared one.
        """
        node = failure.node_rank
        if failure.kind is FailureKind.DISK:
            self._full_disks.add(node)
            if self._shares_disk():
                self.selection.pardon(self._full_disks)
                return
        lost = failure.kind is FailureKind.NODE_LOST
        if not lost or self._losses[node] > 1:
            self.selection.avoid(node)

    def _shares_disk(self) -> bool:
        return len(self._full_disks) > 1

    def replace(self, slow: Mapping[int, str]) -> bool:
        """Leave slow nodes out of the rounds; return whether there are enough others.

        Args:
            slow: the reason for each slow node.
        """
        for node, why in slow.items():
            self.selection.avoid(node)
            host = self._membership.peers[node].host
            kind = FailureKind.LAUNCH
            self.note_avoided(Failure.of_node(node, host, message=why, kind=kind))
        return not slow.keys() & set(self.selection.choose(self._membership.usable()))

    def note_avoided(self, failure: Failure) -> None:
        """Record that later jobs should avoid the host of a failure; this part of the job goes on.

        If only the agent was killed, its host is not to blame. A full disk may be a shared one, or
        is emptied.
        """
        node = failure.node_rank
        ended = {*self._ended, self._own}  # a coordinator whose agent was killed is here again
        agent_killed = failure.kind is FailureKind.NODE_LOST and node in ended
        shared_disk = failure.kind is FailureKind.DISK and self._shares_disk()
        full_disk = failure_texts.is_full_disk(failure.message)
        if not (agent_killed or shared_disk or full_disk):
            self._events.add(
                "avoid",
                node_rank=node,
                host=failure.host,
                kind=failure.kind.value,
                why=failure.message,
            )
