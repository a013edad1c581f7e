"""Decide that a job hangs: no output, no heartbeat, and no stack that changes.

While workers run, the coordinator asks all agents for their signs of life once per interval. An
agent answers how long ago its workers wrote output or called ``ctx.heartbeat()``. After one
interval of silence the coordinator also asks for samples of the stacks; the agents compare each
sample with the one before it (`clusterjob.node.stacks.progress` has the rule). A job hangs when for
the whole timeout no agent has seen a sign of life. An agent that does not answer proves nothing:
the coordinator then asks again, and the lease ends a job whose agent is gone.

Durations come from the clock of the machine that measures them. A node sends the age of its last
sign of life, never a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from clusterjob.node.rendezvous import stack_messages
from clusterjob.node.rendezvous.membership import Peer

# Seconds between two questions: a part of the timeout, between these bounds. The longest one keeps
# the detection within 10 s after the timeout.
_PARTS, _SHORTEST, _LONGEST = 20, 1.0, 5.0
_ANSWER_TIMEOUT = 4.0  # seconds for the answers of all agents
_JITTER = 0.5  # seconds by which the network may delay an answer
_STALL = 2.0  # seconds: a check that is later than this shows that this process did not run


class HangDetection:
    """Detect that the workers of one round hang.

    Args:
        timeout: seconds without a sign of life; None for no detection.
        peers: the agents that have joined, by node_rank.

    Attributes:
        due: the coordinator's monotonic time at which to call `check`; infinity before `start`.
        step: the largest step in the heartbeats of the workers; -1 without one.
    """

    def __init__(self, timeout: float | None, peers: Mapping[int, Peer]) -> None:
        self._timeout = timeout
        self._interval = min(max((timeout or 0.0) / _PARTS, _SHORTEST), _LONGEST)
        self._peers = peers
        self.due = math.inf
        self.step = -1
        self._alive_at = 0.0  # the time of the last sign of life
        self._question = stack_messages.ReportProgress(0, sample=False, first=False)
        self._asked_at = 0.0
        self._unanswered: set[int] = set()
        self._comparable = False  # whether the agents have a sample since the last output

    def start(self) -> None:
        """Start the clock: the workers of all nodes run."""
        if self._timeout is not None:
            self._alive_at = time.monotonic()
            self.due = self._alive_at + self._interval

    def check(self, nodes: set[int]) -> bool:
        """Return whether the job hangs, by the last answers; if not, ask again.

        Args:
            nodes: the nodes whose workers have not all ended.
        """
        moment = time.monotonic()
        if moment > self.due + _STALL:
            self._alive_at = moment  # the workers may have been stopped too
        if not self._unanswered and self._is_last():
            return True
        self._ask({rank for rank in nodes if not self._peers[rank].lost}, moment)
        return False

    def receive(self, peer: Peer, answer: stack_messages.ProgressReported) -> None:
        """Record an agent's answer."""
        if answer.number != self._question.number or peer.node_rank not in self._unanswered:
            return
        self._unanswered.discard(peer.node_rank)
        self.step = max(self.step, answer.step)
        output_at = time.monotonic() - answer.quiet
        if output_at > self._alive_at + _JITTER:
            self._alive_at, self._comparable = output_at, False
        if answer.moved:
            self._alive_at = max(self._alive_at, self._asked_at)
        if not self._unanswered:
            limit = self._alive_at + (self._timeout or 0.0)
            due = self._asked_at + self._interval
            self.due = limit if self._asked_at < limit < due else due
            if self._is_last():
                self.due = time.monotonic()

    def _is_last(self) -> bool:
        """Return whether the last question compared stacks after the whole timeout."""
        compared = self._question.sample and not self._question.first and self._comparable
        return compared and self._asked_at - self._alive_at >= (self._timeout or 0.0)

    def _ask(self, nodes: set[int], moment: float) -> None:
        sample = moment - self._alive_at >= self._interval
        self._question = stack_messages.ReportProgress(
            self._question.number + 1, sample=sample, first=not self._comparable
        )
        self._comparable = sample
        self._unanswered, self._asked_at = nodes, moment
        self.due = moment + _ANSWER_TIMEOUT
        for rank in nodes:
            self._peers[rank].send(self._question)
