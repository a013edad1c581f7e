"""Ask every node for unreported failures before a verdict that only names a lost peer.

Under load, or when the network is cut, an effect may be reported long before its cause. The poll
waits for a silent node until its lease has ended: that node may be the cause itself.
"""

from __future__ import annotations

import time

from clusterjob.node.options import LaunchOptions
from clusterjob.node.rendezvous import messages
from clusterjob.node.rendezvous.membership import Membership
from clusterjob.node.rendezvous.root_cause import RootCause

_SOURCE = "all nodes"


class FailurePoll:
    """One poll of all nodes in one round.

    An agent answers after its forkserver has reported every worker that has ended.

    Args:
        restart: the round.
        root_cause: receives the ranks that have ended with exit code 0.
        membership: the agents.
        options: the heartbeat interval and the lease of a node that does not answer, in seconds.
    """

    def __init__(
        self, restart: int, root_cause: RootCause, membership: Membership, options: LaunchOptions
    ) -> None:
        self._restart = restart
        self._root_cause = root_cause
        self._membership = membership
        self._options = options
        self._unanswered: set[int] = set()
        self._asked = False

    def is_over(self, moment: float) -> bool:
        """Poll the nodes and return False; at a later call, return True.

        The poll delays `RootCause.stop_due`, so the coordinator calls again only after the poll.

        Args:
            moment: the coordinator's monotonic time.
        """
        if self._asked:
            return True
        self._asked = True
        self._unanswered = {
            peer.node_rank for peer in self._membership.peers.values() if not peer.lost
        }
        self._root_cause.wait_for_cause(
            moment + self._options.lease + 2 * self._options.heartbeat, _SOURCE
        )
        self._membership.broadcast(messages.ReportFailures(self._restart))
        return False

    def receive(self, node_rank: int, answer: messages.FailuresReported) -> None:
        """Record a node's answer; the node sent its failures before it."""
        for each in answer.exits:
            self._root_cause.add_early_exit(each.failure, time.monotonic() - each.age)
        self._unanswered.discard(node_rank)
        if self._asked and not self._unanswered:
            self._root_cause.wait_for_cause(0.0, _SOURCE)
