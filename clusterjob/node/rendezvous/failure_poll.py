"""Before a failure that only says "my peer is gone" stands alone, every node is asked for what it
has not told yet.

Under load, or behind a cut in the network, the effect may be heard of long before its cause: a node
that is silent has a lease, and until that is over it may be the cause itself.
"""

from __future__ import annotations

import time

from clusterjob.node.options import LaunchOptions
from clusterjob.node.rendezvous.membership import Gathering
from clusterjob.node.rendezvous.protocol import Message
from clusterjob.node.rendezvous.root_cause import Judge
from clusterjob.node.verdict import Failure

_ASKED = "all nodes"


class Check:
    """One round's question to all nodes, which an agent answers once its starter has told it of
    every end so far.

    Args:
        restart: which round it is.
        judge: told of the ranks that have ended with exit code 0.
        gathering: the agents.
        options: the lease of a node that does not answer.
    """

    def __init__(
        self, restart: int, judge: Judge, gathering: Gathering, options: LaunchOptions
    ) -> None:
        self._restart = restart
        self._judge = judge
        self._gathering = gathering
        self._options = options
        self._open: set[int] = set()
        self._asked = False

    def is_over(self, moment: float) -> bool:
        """Return whether all have answered, or cannot be waited for; asks them if they were not
        yet.

        Args:
            moment: now, by the lead's monotonic clock.
        """
        if not self._asked:
            self._asked = True
            self._open = {
                peer.node_rank for peer in self._gathering.peers.values() if not peer.lost
            }
            self._judge.await_cause(
                moment + self._options.lease + 2 * self._options.heartbeat, _ASKED
            )
            self._gathering.tell_all({"t": "check", "restart": self._restart})
            return False
        return True

    def answer(self, node_rank: int, message: Message) -> None:
        """Take in a node's answer: what had failed there was told before it."""
        for each in message["exits"]:
            self._judge.note_exit(
                Failure.from_json(each["failure"]), time.monotonic() - float(each["age"])
            )
        self._open.discard(node_rank)
        if self._asked and not self._open:
            self._judge.await_cause(0.0, _ASKED)
