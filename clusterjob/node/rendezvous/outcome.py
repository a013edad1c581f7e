"""The outcome of one round of workers, and the verdict that follows from the last one."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from clusterjob.node.logs.events import now
from clusterjob.node.rendezvous.evidence import Evidence
from clusterjob.node.verdict import (
    CANCELLED_EXIT_CODE,
    PREEMPTED_EXIT_CODE,
    TIMEOUT_EXIT_CODE,
    Failure,
    FailureKind,
    JobState,
    RoundEnd,
    Verdict,
    bounded,
)

_MAX_CONSEQUENCES = 256  # maximum failures that a verdict lists besides the root cause
_TIME_LIMIT = "time_limit"  # the kind of a round that the time limit has ended
_MAX_MESSAGE = 200  # characters of the message of such a failure


class Agent(Protocol):
    """An agent that has joined."""

    @property
    def node_rank(self) -> int:
        """The number of its node."""

    @property
    def host(self) -> str:
        """The host of its node."""

    @property
    def pid(self) -> int:
        """Its process."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a round: success, a failure, or a reason to stop.

    Attributes:
        signal: the signal that stops the remaining workers.
        stacks: whether to save the stacks of the remaining workers first.
        terminated: whether a scheduler has sent SIGTERM, which SIGKILL follows.
    """

    state: JobState
    exit_code: int = 0
    reason: str = ""
    failure: Failure | None = None
    signal: int = signal.SIGTERM
    stacks: bool = False
    terminated: bool = False


def failed(failure: Failure) -> Outcome:
    """Return the outcome of a round with this root cause."""
    return Outcome(
        JobState.FAILED,
        failure.exit_code or 1,
        reason=f"{failure.who}: {failure.message}",
        failure=failure,
        stacks=True,
    )


def preempted(reason: str) -> Outcome:
    """Return the outcome of a round that a preemption ended."""
    return Outcome(JobState.PREEMPTED, PREEMPTED_EXIT_CODE, reason=reason)


def out_of_time(seconds: float) -> Outcome:
    """Return the outcome of a round that reached the job's time limit."""
    reason = f"the time limit of {seconds:g} s was reached"
    return Outcome(JobState.FAILED, TIMEOUT_EXIT_CODE, reason=reason, stacks=True)


def cancelled(reason: str, *, interrupt: bool, stacks: bool = False) -> Outcome:
    """Return the outcome of a round that the user cancelled, or interrupted with Ctrl-C."""
    return Outcome(
        JobState.CANCELLED,
        CANCELLED_EXIT_CODE,
        reason=reason,
        signal=signal.SIGINT if interrupt else signal.SIGTERM,
        stacks=stacks,
    )


def coordinator_failed(error: Exception, attempt: int) -> Verdict:
    """Return the verdict of a job whose coordinator has a defect."""
    return Verdict(
        JobState.FAILED,
        1,
        reason=f"node 0 failed: {type(error).__name__}: {error}",
        attempt=attempt,
        ended_at=now(),
    )


def node_loss(peer: Agent, own: Agent, why: str, *, by_agent: bool, stalled: float) -> Failure:
    """Return the failure of the node at fault when two agents have lost each other.

    Args:
        peer: the other agent.
        own: the coordinator's agent.
        why: why one of them counts the other as lost.
        by_agent: whether the other agent has lost the coordinator, which still hears it.
        stalled: seconds for which this process did not run; 0 if it ran.
    """
    node = peer
    text = f"the agent on {peer.host} (pid {peer.pid})"
    if not by_agent:
        text += f" was lost: {why}"
    elif not stalled:
        text += f" lost the coordinator, which still receives its messages: {why}"
    else:
        node = own
        text = (
            f"the agent on {own.host} (pid {own.pid}) did not run for {stalled:.0f} s (stopped,"
            f" suspended or without a CPU), and node {peer.node_rank} lost it"
        )
    return Failure.of_node(node.node_rank, node.host, message=text)


def too_few(missing: Failure | None, after: Outcome | None) -> Outcome | None:
    """Return the outcome of a job whose next round has too few nodes; None if `missing` is None.

    Args:
        missing: the failure of a node that did not come.
        after: the outcome of the last round, which stays the root cause; None before the first.
    """
    if missing is None or after is None or after.failure is None:
        return None if missing is None else failed(missing)
    return failed(replace(after.failure, message=f"{after.failure.message}; {missing.message}"))


def no_answer(peer: Agent) -> Failure:
    """Return the failure of a node that does not stop its workers."""
    return Failure.of_node(peer.node_rank, peer.host, message="does not answer the stop order")


def round_end(end: Outcome, attempt: int, restart: int, started_at: str | None) -> RoundEnd:
    """Return the entry of a round in the job's ``attempts``.

    Args:
        end: the outcome of the round.
        attempt: the number of the job's attempt, from 0.
        restart: the number of the round, from 0.
        started_at: when its workers were started; None if they were not.
    """
    failure = end.failure
    if failure is not None:
        kind = failure.kind.value
    elif end.exit_code == TIMEOUT_EXIT_CODE:
        kind = _TIME_LIMIT
    else:  # "cancelled" and "preempted" are states
        kind = "" if end.state is JobState.SUCCEEDED else end.state.value.lower()
    return RoundEnd(
        attempt,
        restart,
        kind=kind,
        host=failure.host if failure else None,
        node=failure.node_rank if failure else None,
        rank=failure.rank if failure else None,
        started_at=started_at,
        ended_at=now(),
        message=(failure.message if failure else end.reason)[: RoundEnd.MAX_MESSAGE],
        where=failure.where[: RoundEnd.MAX_MESSAGE] if failure else "",
    )


def of_round(ended: RoundEnd) -> Outcome:
    """Return the outcome of a round that was recorded; the failure names the node alone."""
    if ended.kind in set(FailureKind):
        kind = FailureKind(ended.kind)
        node, host = ended.node or 0, ended.host or "unknown"
        failure = Failure.of_node(node, host, message=ended.message, kind=kind)
        return failed(replace(failure, where=ended.where))
    if ended.kind == "preempted":
        return preempted(ended.message)
    if ended.kind == "cancelled":
        return cancelled(ended.message, interrupt=False)
    if ended.kind == _TIME_LIMIT:
        return Outcome(JobState.FAILED, TIMEOUT_EXIT_CODE, reason=ended.message)
    return Outcome(JobState.SUCCEEDED)


def final_verdict(
    end: Outcome,
    consequences: Sequence[Failure],
    evidence: Evidence | None,
    restarts: int,
    attempt: int,
    started_at: str | None,
    rounds: Sequence[RoundEnd],
) -> Verdict:
    """Return the job's verdict.

    Args:
        end: the outcome of the last round.
        consequences: the other failures of that round, in order of time.
        evidence: the stacks that were saved before its stop; None without.
        restarts: how often the workers were started again.
        attempt: the number of the job's attempt, from 0.
        started_at: when the first workers were started; None if none were.
        rounds: the rounds of all attempts.
    """
    # Every worker has its own log; the messages of a thousand ranks do not fit into one message
    # between agents.
    others = [item for item in consequences if item != end.failure]
    named = tuple(
        replace(item, last_lines=(), message=item.message[:_MAX_MESSAGE])
        for item in others[:_MAX_CONSEQUENCES]
    )
    return Verdict(
        end.state,
        end.exit_code,
        reason=end.reason,
        failure=end.failure,
        consequences=named if end.failure else (),
        restarts=restarts,
        attempt=attempt,
        started_at=started_at,
        ended_at=now(),
        evidence=evidence.path if evidence is not None else "",
        evidence_ranks=len(evidence.stacks) if evidence is not None and evidence.path else 0,
        attempts=bounded(rounds),
    )
