"""Track a preemption: the warning, the deadline, and the workers that end because of it.

A scheduler warns a job before it takes its nodes. A worker then saves a checkpoint and exits with
code 75, to be queued again; a worker that ignores the warning is stopped in time for a verdict. The
scheduler's signals reach the agents and workers of all nodes at about the same time, so a worker's
end by such a signal may be reported before the warning that explains it.
"""

from __future__ import annotations

from clusterjob.node.rendezvous.root_cause import Entry, Key, RootCause, key_of
from clusterjob.node.verdict import PREEMPTED_EXIT_CODE, Failure, FailureKind

# Seconds to wait for the warning after a worker's end that looks like a preemption.
WARNING_TIMEOUT = 3.0
_MARGIN = 2.0  # seconds for the verdict, beyond the grace


class Preemption:
    """The warning of one attempt, and the workers that ended because of it.

    A suspect is a worker that ended as if it had been warned, before any warning arrived.

    Args:
        warning: seconds between a warning and the end; None for a job that cannot be preempted.
        grace: seconds between SIGTERM and SIGKILL when workers are stopped.
        any_end: whether each end of a worker after the warning counts as an answer to it: scripts
            that handle a signal exit with any code.

    Attributes:
        reason: the warning, such as ``SIGUSR1 on gpu7``; empty before it.
        due: the coordinator's monotonic time at which the workers must be stopped.
        ends_at: the time at which the scheduler ends the job, without a margin for the verdict.
        left: the workers that have ended because of the warning.
    """

    def __init__(self, warning: float | None, grace: float, *, any_end: bool = False) -> None:
        self._warning = warning
        self._grace = grace
        self._any_end = any_end
        self._suspects: dict[Key, Entry] = {}
        self.left: set[Key] = set()
        self._stopping = False
        self.reason = ""
        self.due = self.ends_at = float("inf")

    @property
    def seconds(self) -> float:
        """The seconds that the workers have after the warning."""
        if self._warning is None:
            return float("inf")
        return max(self._warning / 2, self._warning - self._grace - _MARGIN)

    @property
    def suspects_due(self) -> float:
        """The coordinator's monotonic time at which the first suspect counts as a failure."""
        return min(
            (each.at + WARNING_TIMEOUT for each in self._suspects.values()), default=float("inf")
        )

    def warn(self, reason: str, at: float) -> bool:
        """Record a warning; return whether it is the first.

        Args:
            reason: the warning, such as ``SIGUSR1 on gpu7``.
            at: the coordinator's monotonic time.
        """
        if self.reason:
            return False
        self.reason, self.due = reason, at + self.seconds
        self.ends_at = at + (self._warning or float("inf")) - _MARGIN
        self.left |= self._suspects.keys()
        self._suspects.clear()
        return True

    def explain(self, how: str) -> str:
        """Return how the warning has ended a round, as one line."""
        return f"{self.reason}: {how}"

    def begin_round(self) -> None:
        """Forget the workers of the last round; keep the warning."""
        self.left.clear()
        self._suspects.clear()
        self._stopping = False

    def explains(self, failure: Failure, at: float, *, exited: bool) -> bool:
        """Return whether a preemption explains a worker's end, or may still explain it.

        Args:
            failure: the worker's end.
            at: when it began, by the coordinator's monotonic clock.
            exited: whether the worker has ended.
        """
        if self._stopping or (self._warning is None and not self.reason):
            return False
        key = key_of(failure)
        terminated = failure.kind is FailureKind.TERMINATED
        leaves = terminated or failure.exit_code == PREEMPTED_EXIT_CODE
        if self.reason:
            if leaves or self._any_end or (self.left and failure.effect):
                self.left.add(key)
            return key in self.left
        known = self._suspects.get(key)
        if known is not None:
            known.exited |= exited
        elif leaves:
            self._suspects[key] = Entry(failure, at, exited=exited)
        return key in self._suspects

    def end_round(self, root_cause: RootCause) -> None:
        """Count all suspects as failures; the stop order causes all later ends."""
        self.release(root_cause)
        self._stopping = True

    def release(self, root_cause: RootCause, moment: float = float("inf")) -> None:
        """Count suspects as failures if no warning has explained them within 3 s.

        Args:
            root_cause: receives the failures.
            moment: the coordinator's monotonic time.
        """
        for key, suspect in list(self._suspects.items()):
            if suspect.at + WARNING_TIMEOUT <= moment:
                del self._suspects[key]
                root_cause.add(suspect.failure, suspect.at, exited=suspect.exited)
