"""Keep the state with which another process can go on as the coordinator."""

from __future__ import annotations

import math
import os
import time

from clusterjob.node.environments import scheduler
from clusterjob.node.rendezvous import coordinator_state, succession
from clusterjob.node.rendezvous.coordinator_state import CoordinatorState, Succession, Successor
from clusterjob.node.rendezvous.history import History
from clusterjob.node.rendezvous.identity import NodeJob
from clusterjob.node.rendezvous.membership import Membership, Peer
from clusterjob.node.rendezvous.nodes import Nodes
from clusterjob.node.rendezvous.time_limit import TimeLimit
from clusterjob.node.system import files, processes

_MAX_ROUNDS = 100  # of many rounds, the latest are sent


class StateKeeper:
    """Write the coordinator's state to the disk, and send it to its successors.

    Without restarts it does nothing.

    Args:
        node: the job, as the coordinator's node sees it.
        membership, nodes, history, time_limit: parts of the coordinator.
        moves: how often the coordinator has moved.
        shift: seconds from this machine's monotonic clock to the clock of the job's events.
    """

    def __init__(
        self,
        node: NodeJob,
        membership: Membership,
        nodes: Nodes,
        history: History,
        time_limit: TimeLimit,
        *,
        moves: int,
        shift: float,
    ) -> None:
        self._own = node.topology.node_rank
        self._used = node.options.restarts
        self._may_move = succession.may_move(node)
        self._job_dir = node.directory
        self._membership = membership
        self._nodes = nodes
        self._history = history
        self._time_limit = time_limit
        self._moves = moves
        self._shift = shift
        self._state: CoordinatorState | None = None

    def keep(self, restarts: int, started_at: str | None) -> None:
        """Keep the state of a round that has begun.

        Args:
            restarts: the number of the round.
            started_at: when the first workers were started; None before.
        """
        if not self._used or started_at is None:
            return
        moment, due = time.monotonic(), self._time_limit.due
        order = succession.successors(self._membership.peers, self._own)
        before, now = self._nodes.groups[0], self._nodes.groups[-1]
        self._state = CoordinatorState(
            self._history.attempt,
            restarts,
            started_at=started_at,
            seconds_left=None if math.isinf(due) else max(0.0, due - moment),
            limit_runs=self._time_limit.runs,
            node=self._own,
            host=scheduler.node_name(),
            moves=self._moves,
            process=processes.identity(os.getppid()),
            members=tuple(sorted(now.nodes)),
            before=tuple(sorted(before.nodes)) if before is not now else (),
            before_node=before.coordinator,
            nodes=tuple(self._nodes.selection.nodes),
            avoided=tuple(self._nodes.selection.avoided),
            addresses=tuple(each.address for each in order),
            clock=moment + self._shift,
            made_at=moment,
            boot_id=processes.boot_id(),
        )
        files.later(coordinator_state.write, self._job_dir, self._state)
        self._send(list(self._membership.peers.values()), order)

    def send(self, peer: Peer) -> None:
        """Tell an agent that has joined during a round who may take the coordinator's place."""
        if self._state is not None:
            self._send([peer], succession.successors(self._membership.peers, self._own))

    def _send(self, peers: list[Peer], order: tuple[Successor, ...]) -> None:
        if not self._may_move:
            return
        heirs = {each.node for each in order}
        assert self._state is not None
        seen = self._state.restarts + 1
        full = Succession(order, seen, self._state, tuple(self._history.rounds[-_MAX_ROUNDS:]))
        brief = Succession(order, seen)  # one message: it is encoded once for all agents
        for peer in peers:
            peer.send(full if peer.node_rank in heirs else brief)
