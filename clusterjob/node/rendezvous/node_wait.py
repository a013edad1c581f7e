"""Decide how long to wait for the nodes of a round, and report the missing ones."""

from __future__ import annotations

import time
from collections.abc import Callable

from clusterjob.node.logs.events import EventLog
from clusterjob.node.options import LaunchOptions
from clusterjob.node.rendezvous.membership import Membership
from clusterjob.node.rendezvous.node_selection import NodeSelection
from clusterjob.node.system.ranges import ranges
from clusterjob.node.verdict import Failure

_NOTICE_INTERVAL = 5.0  # seconds between two notices about missing nodes
# Seconds to wait for more nodes when there are enough: other nodes start at about the same time,
# and an agent that was killed comes back after a second or two.
_SETTLE_SECONDS = 5.0
# Seconds for the other nodes to join a coordinator that has lost them, or has moved.
_ALONE_SECONDS = 6.0


class NodeWait:
    """The wait for the nodes of one round.

    Args:
        membership: the agents that have joined.
        selection: chooses the nodes of the round.
        options: the join timeout, and the smallest number of nodes of an elastic job.
        nnodes: the number of all nodes of the job, spare ones included.
        first: whether no round has begun.
        majority: returns whether no other part of a split job can go on.
        alone: returns whether the other nodes may be with another coordinator.
        events: records that the coordinator waits.
        print_line: prints one line for the user.
    """

    def __init__(
        self,
        membership: Membership,
        selection: NodeSelection,
        options: LaunchOptions,
        nnodes: int,
        *,
        first: bool,
        majority: Callable[[], bool],
        alone: Callable[[], bool],
        events: EventLog,
        print_line: Callable[[str], None],
    ) -> None:
        self._membership = membership
        self._selection = selection
        self._nnodes = nnodes
        self._first = first
        self._majority = majority
        self._alone = alone
        self._events = events
        self._print_line = print_line
        self._begin = self._noticed = time.monotonic()
        elastic = options.min_nodes is not None
        self._timeout = options.join_timeout if first or elastic else options.return_timeout

    def over(self) -> bool:
        """Return whether the round can begin."""
        usable = self._membership.usable()
        if len(usable) < self._selection.least or not self._majority():
            return False
        if self._first and len(usable) == self._nnodes:
            return True
        if not self._first and self._selection.complete(usable):
            return True
        # Without other nodes that may still come, there is no reason to wait.
        settle = _SETTLE_SECONDS if len(usable) < self._nnodes else 0.0
        since = max(self._begin, self._membership.joined_at)
        if time.monotonic() - since < settle:
            return False
        return len(self._selection.choose(usable)) >= self._selection.least

    def is_alone(self) -> bool:
        """Return whether the other nodes have had the time to join, and may be elsewhere."""
        return time.monotonic() - self._begin > _ALONE_SECONDS and self._alone()

    def failure(self) -> Failure | None:
        """Return the failure of a node that did not come in time, or that was lost, else None.

        Until then, print the missing nodes every 5 s.
        """
        moment = time.monotonic()
        waited = moment - self._begin
        peers = self._membership.peers
        lost = [node for node, peer in peers.items() if peer.lost]
        if self._first and self._nnodes - len(lost) < self._selection.least:
            return self._membership.losses[lost[-1]]
        if waited <= self._timeout and moment - self._noticed <= _NOTICE_INTERVAL:
            return None
        self._noticed = moment
        missing = [node for node in range(self._nnodes) if node not in peers or peers[node].lost]
        if not missing:  # the last one has joined since the caller looked
            return None
        names = f"node {', '.join(ranges(missing))} of {self._nnodes}"
        if waited > self._timeout:
            usable = len(self._selection.choose(self._membership.usable()))
            never = f"{names} never joined within {self._timeout:g} s"
            few = f"{usable} of {self._selection.least} nodes are left"
            text = never if self._first else f"{few}, and none came within {self._timeout:g} s"
            return Failure.of_node(missing[0], "unknown", message=text)
        self._print_line(f"waiting for {names}, {waited:.0f} s so far")
        self._events.add("waiting", missing=missing, seconds=round(waited, 1))
        return None
