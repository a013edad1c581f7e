"""One round of workers: their ranks, the reports of the agents, and the root cause."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from clusterjob.node.contract import World
from clusterjob.node.logs.events import EventLog
from clusterjob.node.options import LaunchOptions
from clusterjob.node.rendezvous import messages, stack_messages
from clusterjob.node.rendezvous.evidence import Evidence
from clusterjob.node.rendezvous.hang_detection import HangDetection
from clusterjob.node.rendezvous.identity import JobIdentity
from clusterjob.node.rendezvous.membership import Membership, Peer
from clusterjob.node.rendezvous.missing_ranks import MissingRanks, Unfinished
from clusterjob.node.rendezvous.preemption import Preemption
from clusterjob.node.rendezvous.rank_counter import RankCounter
from clusterjob.node.rendezvous.rank_map import RankMap
from clusterjob.node.rendezvous.root_cause import RootCause
from clusterjob.node.rendezvous.straggler_watch import StragglerWatch
from clusterjob.node.stacks import grouping
from clusterjob.node.verdict import Failure

# Seconds for which a verdict waits for the agents' answers about missing ranks: the time of
# `stacks.ANSWER_SECONDS` and of the network.
_ANSWER_TIMEOUT = 3.0
_MAX_SHOWN = 8  # maximum stacks to show of workers that still run, per node
# Names of the sources for which a verdict may wait (`RootCause.wait_for_cause`): a probe, a poll.
_PROBE, _POLL = "missing ranks", "all nodes"


class Round:
    """One round of workers on all nodes.

    Args:
        restart: the number of the round, from 0.
        membership: the agents.
        preemption: the job's preemption warning, and the workers that ended because of it.
        options: the heartbeat interval and the lease, in seconds.
        events: the job's events.
        job: the job's identity.
        job_dir: the job's directory.
        own: the coordinator's node.
        worlds: the world of each node, by the node's number; empty before the first round. Spare
            nodes have none. A world without workers only serves the store.

    Attributes:
        nodes: the nodes that run workers.
        ranks: the ranks of each node.
        root_cause: the failures of the round.
        unfinished: the workers that still run after the others succeeded.
        evidence: the stacks that are saved before the round is stopped.
        hang: detects that the workers hang.
        undone: the nodes whose workers have not all ended.
        unstopped: the nodes whose workers are not all stopped.
        handlers: the function for each message that belongs to the round.
    """

    def __init__(
        self,
        restart: int,
        membership: Membership,
        preemption: Preemption,
        options: LaunchOptions,
        events: EventLog,
        job: JobIdentity,
        job_dir: Path,
        own: int,
        worlds: Mapping[int, World] | None = None,
    ) -> None:
        self._restart = restart
        self._membership = membership
        self._preemption = preemption
        self._options = options
        self._events = events
        worlds = worlds or {}
        self.nodes = frozenset(node for node, world in worlds.items() if world.nproc)
        self.ranks = RankMap.of(worlds)
        self.root_cause = RootCause()
        self.unfinished = Unfinished(self.ranks)
        self._missing_ranks = MissingRanks(self.ranks)
        self.evidence = Evidence(
            grouping.Round(job.job_id, job.attempt, restart, node_rank=own),
            membership,
            job_dir=job_dir,
            events=events,
            local_rank=self.ranks.local_rank,
        )
        self.hang = HangDetection(options.hang_timeout, membership.peers)
        self._ended: set[tuple[int, int]] = set()  # node_rank and local rank of ended workers
        self._rank_counts = RankCounter(restart, self.ranks.world_size, events=events)
        self._unpolled: set[int] | None = None  # nodes that still have to answer the poll
        self._unstarted = set(self.nodes)
        self.undone = set(self.nodes)
        self.unstopped = set(worlds)
        preemption.begin_round()
        self.handlers: dict[type, Callable[[Peer, Any], None]] = {
            messages.Done: lambda peer, _done: self.undone.discard(peer.node_rank),
            messages.Stopped: lambda peer, _stopped: self.unstopped.discard(peer.node_rank),
            messages.Succeeded: self._on_succeeded,
            messages.RankCounts: self._rank_counts.receive,
            messages.RankWaits: StragglerWatch(restart, self.ranks, events).receive,
            messages.Failing: self._on_failing,
            messages.RanksMissing: self._on_ranks_missing,
            messages.RanksProbed: self._on_ranks_probed,
            messages.FailuresReported: self._on_failures_reported,
            stack_messages.ProgressReported: self.hang.receive,
            **self.evidence.handlers,
        }

    def note_running(self, peer: Peer) -> bool:
        """Record that all workers of a node were started; return whether it was the last node."""
        if peer.node_rank not in self._unstarted:
            return False
        self._unstarted.discard(peer.node_rank)
        if self._unstarted:
            return False
        self.hang.start()
        self._events.add("running", restart=self._restart)
        return True

    def root(self) -> Failure | None:
        """Return the root cause; ignore effects if a worker left because of a preemption."""
        if self._preemption.left:
            self.root_cause.drop_effects()
        return self.root_cause.root()

    def is_unexplained(self) -> bool:
        """Return whether every failure only names a lost peer; the nodes are then polled."""
        root = self.root()
        return root is not None and root.effect

    def living_nodes(self) -> set[int]:
        """Return the nodes on which workers may still run."""
        peers = self._membership.peers
        ended = Counter(node_rank for node_rank, _ in self._ended)
        return {rank for rank in self.undone if ended[rank] < peers[rank].nproc}

    def name_unfinished(self) -> None:
        """Write the workers that still run into the events, and their stacks into their logs."""
        text, by_node = self.unfinished.name()
        self._events.add("unfinished", text=text)
        for node_rank, ranks in by_node.items():
            probe = messages.ProbeRanks(tuple(ranks[:_MAX_SHOWN]), final=False, note=text)
            self._membership.peers[node_rank].send(probe)

    def poll_is_over(self, moment: float) -> bool:
        """Ask every node for unreported failures and return False; at a later call, return True.

        The coordinator polls before a verdict that only names a lost peer: under load, or when the
        network is cut, an effect may be reported long before its cause. The poll waits for a silent
        node until its lease has ended, because that node may be the cause. It delays
        `RootCause.stop_due`, so the coordinator calls again only after the poll.

        Args:
            moment: the coordinator's monotonic time.
        """
        if self._unpolled is not None:
            return True
        peers = self._membership.peers
        self._unpolled = {node for node in self.nodes if not peers[node].lost}
        until = moment + self._options.lease + 2 * self._options.heartbeat
        self.root_cause.wait_for_cause(until, _POLL)
        for node in self._unpolled:
            peers[node].send(messages.ReportFailures(self._restart))
        return False

    def _on_failures_reported(self, peer: Peer, message: messages.FailuresReported) -> None:
        """Record a node's answer to the poll; the node sent its failures before it."""
        if message.restart != self._restart:
            return
        for each in message.exits:
            self.root_cause.add_early_exit(each.failure, time.monotonic() - each.age)
        if self._unpolled is not None:
            self._unpolled.discard(peer.node_rank)
            if not self._unpolled:
                self.root_cause.wait_for_cause(0.0, _POLL)

    def _on_succeeded(self, peer: Peer, message: messages.Succeeded) -> None:
        if peer.node_rank in self.nodes and message.local_rank < peer.nproc:
            self.unfinished.ended(peer.node_rank, message.local_rank)
            self._ended.add((peer.node_rank, message.local_rank))

    def _on_failing(self, peer: Peer, message: messages.Failing) -> None:
        if message.failure.local_rank is not None:
            self._ended.add((peer.node_rank, message.failure.local_rank))
        at = time.monotonic() - message.age
        if not self._preemption.explains(message.failure, at, exited=message.exited):
            self.root_cause.add(message.failure, at, exited=message.exited)
            self._missing_ranks.note(message.failure)
            self._add_missing_ranks()

    def _on_ranks_missing(self, peer: Peer, message: messages.RanksMissing) -> None:
        """Ask the agents for the state of the ranks that a worker waits for."""
        if message.restart != self._restart:
            return
        self._rank_counts.write()
        by_node = self._missing_ranks.ask(peer.node_rank, message)
        if message.final and by_node:
            self.root_cause.wait_for_cause(time.monotonic() + _ANSWER_TIMEOUT, _PROBE)
        for node_rank, ranks in by_node.items():
            probe = messages.ProbeRanks(tuple(ranks), final=message.final)
            self._membership.peers[node_rank].send(probe)

    def _on_ranks_probed(self, peer: Peer, message: messages.RanksProbed) -> None:
        if message.restart != self._restart:
            return
        self._events.add("missing", node_rank=peer.node_rank, workers=list(message.lines))
        found = self._missing_ranks.receive(peer.node_rank, message)
        if found is not None:
            self._membership.peers[found[0]].send(found[1])
        if message.final and self._missing_ranks.answered:
            self.root_cause.wait_for_cause(0.0, _PROBE)
        self._add_missing_ranks()

    def _add_missing_ranks(self) -> None:
        for failure in self._missing_ranks.causes():
            self.root_cause.add(failure, time.monotonic(), exited=True)
