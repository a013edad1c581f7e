"""Record how the rounds of a job end, and decide whether another round follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from clusterjob.node.logs import ends
from clusterjob.node.logs.events import ROUND_ENDED, EventLog, ended_rounds
from clusterjob.node.rendezvous import outcome
from clusterjob.node.rendezvous.identity import NodeJob
from clusterjob.node.rendezvous.outcome import Outcome
from clusterjob.node.rendezvous.policy import Decision, Policy
from clusterjob.node.verdict import RoundEnd


class History:
    """The rounds of a job that have ended, and the policy for the next one.

    Args:
        node: the job, as the coordinator's node sees it.
        events: the job's events.

    Attributes:
        attempt: the number of the job's attempt.
        rounds: the rounds that have ended, of all attempts of the job.
        started_at: when the workers of the current round were started; None before the first.
        most: the largest number of restarts in this attempt.
    """

    def __init__(self, node: NodeJob, events: EventLog) -> None:
        self.attempt = node.identity.attempt
        self._job_dir = node.directory
        self._events = events
        self._node = node
        self.started_at: str | None = None
        self.resume(ended_rounds(node.directory, running=False) if self.attempt else ())
        self.most = self._policy.most

    def resume(self, earlier: Sequence[RoundEnd]) -> None:
        """Go on after the rounds of an earlier coordinator, or of earlier attempts."""
        self.rounds = list(earlier)
        options = self._node.options
        free = options.machine_restarts(self._node.topology.nnodes)
        self._policy = Policy(options, earlier, self.attempt, free=free)

    def decide(self, end: Outcome, restart: int) -> tuple[Outcome, Decision]:
        """Record the end of a round, and decide what follows.

        Args:
            end: the outcome of the round.
            restart: the number of the round, from 0.

        Returns:
            The outcome, with the reason if there is no restart; and the decision.
        """
        self.add(end, restart)
        decision = self._policy.decide(end)
        if decision.more_memory:
            return self._with_more_memory(end, decision), decision
        if decision.why:
            end = replace(end, reason=f"{end.reason} (not restarted: {decision.why})")
        return end, decision

    def _with_more_memory(self, end: Outcome, decision: Decision) -> Outcome:
        """Let the job's script queue the job again with more memory."""
        try:
            ends.want_memory(self._job_dir, self.attempt, decision.more_memory)
        except OSError as error:
            return replace(end, reason=f"{end.reason} (not queued again: {error.strerror})")
        reason = f"{end.reason}; queued again with {decision.more_memory:g} times the memory"
        return replace(outcome.preempted(reason), failure=end.failure)

    def add(self, end: Outcome, restart: int) -> None:
        """Record the end of a round, or of an attempt that started no workers."""
        ended = outcome.round_end(end, self.attempt, restart, started_at=self.started_at)
        self.rounds.append(ended)
        # The time of the event is `ended_at`.
        fields = {name: value for name, value in vars(ended).items() if name != "ended_at"}
        self._events.add(ROUND_ENDED, **fields)
