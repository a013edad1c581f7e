"""The outcome of one round of workers, and the verdict that follows from the last one."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

from clusterjob.node.logs.events import now
from clusterjob.node.rendezvous.evidence import Evidence
from clusterjob.node.rendezvous.membership import Peer
from clusterjob.node.rendezvous.root_cause import RootCause
from clusterjob.node.verdict import (
    CANCELLED_EXIT_CODE,
    PREEMPTED_EXIT_CODE,
    TIMEOUT_EXIT_CODE,
    Failure,
    FailureKind,
    JobState,
    Verdict,
)

_MAX_CONSEQUENCES = 256  # maximum failures that a verdict lists besides the root cause
_MAX_MESSAGE = 200  # characters of the message of such a failure


@dataclass(frozen=True)
class Outcome:
    """The outcome of a round: success, a failure, or a reason to stop.

    Attributes:
        signal: the signal that stops the remaining workers.
        stacks: whether to save the stacks of the remaining workers first.
    """

    state: JobState
    exit_code: int = 0
    reason: str = ""
    failure: Failure | None = None
    signal: int = signal.SIGTERM
    stacks: bool = False


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


def node_loss(peer: Peer, own: Peer, why: str, *, by_agent: bool, stalled: float) -> Failure:
    """Return the failure of the node at fault when two agents have lost each other.

    Args:
        peer: the other agent.
        own: node 0's agent.
        why: why one of them counts the other as lost.
        by_agent: whether the other agent has lost node 0, which still receives its messages.
        stalled: seconds for which this process did not run; 0 if it ran.
    """
    node = peer
    text = f"the agent on {peer.host} (pid {peer.pid})"
    if not by_agent:
        text += f" was lost: {why}"
    elif not stalled:
        text += f" lost node 0, which still receives its messages: {why}"
    else:
        node = own
        text = (
            f"the agent on {own.host} (pid {own.pid}) did not run for {stalled:.0f} s (stopped,"
            f" suspended or without a CPU), and node {peer.node_rank} lost it"
        )
    return Failure.of_node(node.node_rank, node.host, message=text)


def final_verdict(
    end: Outcome,
    root_cause: RootCause,
    evidence: Evidence,
    restarts: int,
    attempt: int,
    started_at: str | None,
) -> Verdict:
    """Return the job's verdict.

    Args:
        end: the outcome of the last round.
        root_cause: the failures of that round.
        evidence: the stacks that were saved before its stop.
        restarts: how often the workers were started again.
        attempt: the number of the job's attempt, from 0.
        started_at: when the first workers were started; None if none were.
    """
    hangs = end.failure is not None and end.failure.kind is FailureKind.HANG
    if end.failure is not None and end.failure.rank is not None and not hangs:
        # A report that arrived during the stop may be older, or more complete.
        end = failed(root_cause.root() or end.failure)
    # Every worker has its own log; the messages of a thousand ranks do not fit into one message
    # between agents.
    others = [item for item in root_cause.consequences() if item != end.failure]
    consequences = tuple(
        replace(item, last_lines=(), message=item.message[:_MAX_MESSAGE])
        for item in others[:_MAX_CONSEQUENCES]
    )
    return Verdict(
        end.state,
        end.exit_code,
        reason=end.reason,
        failure=end.failure,
        consequences=consequences if end.failure else (),
        restarts=restarts,
        attempt=attempt,
        started_at=started_at,
        ended_at=now(),
        evidence=evidence.path,
        evidence_ranks=len(evidence.stacks) if evidence.path else 0,
    )
