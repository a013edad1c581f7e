"""The outcome of one round of workers."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from clusterjob.node.verdict import (
    CANCELLED_EXIT_CODE,
    PREEMPTED_EXIT_CODE,
    TIMEOUT_EXIT_CODE,
    Failure,
    JobState,
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a round: success, a failure, or a reason to stop.

    Attributes:
        signal: the signal that stops the remaining workers.
    """

    state: JobState
    exit_code: int = 0
    reason: str = ""
    failure: Failure | None = None
    signal: int = signal.SIGTERM


def failed(failure: Failure) -> Outcome:
    """Return the outcome of a round with this root cause."""
    return Outcome(
        JobState.FAILED,
        failure.exit_code or 1,
        reason=f"{failure.who}: {failure.message}",
        failure=failure,
    )


def preempted(reason: str) -> Outcome:
    """Return the outcome of a round that a preemption ended."""
    return Outcome(JobState.PREEMPTED, PREEMPTED_EXIT_CODE, reason=reason)


def out_of_time(seconds: float) -> Outcome:
    """Return the outcome of a round that reached the job's time limit."""
    reason = f"the time limit of {seconds:g} s was reached"
    return Outcome(JobState.FAILED, TIMEOUT_EXIT_CODE, reason=reason)


def cancelled(reason: str, *, interrupt: bool) -> Outcome:
    """Return the outcome of a round that the user cancelled, or interrupted with Ctrl-C."""
    number = signal.SIGINT if interrupt else signal.SIGTERM
    return Outcome(JobState.CANCELLED, CANCELLED_EXIT_CODE, reason=reason, signal=number)
