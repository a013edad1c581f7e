"""What the lead knows of a preemption: that the end is near, how long the workers have, and which
of their ends belong to it.

A scheduler warns a job before it takes its nodes. Workers then save, and leave with the exit code
75 in order to be queued again; or they know nothing of it, and are stopped in time for a verdict.
The scheduler's signals reach agents and workers of all nodes at about the same time, so an end by
such a signal may be heard of before the warning that explains it.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterjob.node.rendezvous.root_cause import Judge
from clusterjob.node.verdict import PREEMPTED_EXIT_CODE, Failure, is_termination

SUSPICION = (
    3.0  # seconds for which a worker's end that looks like a preemption's waits for the warning
)
_MARGIN = 2.0  # seconds that are kept, beside the grace, for the verdict itself


@dataclass
class _Suspect:
    failure: Failure
    at: float  # the lead's monotonic clock
    exited: bool


class Notice:
    """The warning of one start of a job, and the workers that went because of it.

    Args:
        warning: seconds between a warning and the end; None for a job that may not be preempted.
        grace: seconds between SIGTERM and SIGKILL when workers have to be stopped.
    """

    def __init__(self, warning: float | None, grace: float) -> None:
        self._warning = warning
        self._grace = grace
        self._suspects: list[_Suspect] = []
        self._left: set[tuple[int, int | None]] = set()
        self._stopping = False
        self.why = ""  # empty while there was no warning
        self.due = float("inf")  # when the workers are to be stopped, by the lead's monotonic clock

    @property
    def seconds(self) -> float:
        """How long the workers have from the warning on."""
        if self._warning is None:
            return float("inf")
        return max(self._warning / 2, self._warning - self._grace - _MARGIN)

    @property
    def left(self) -> bool:
        """Whether a worker has left because of the warning."""
        return bool(self._left)

    @property
    def suspicion_due(self) -> float:
        """When a worker's end can wait for a warning no longer, by the lead's monotonic clock."""
        return min((suspect.at + SUSPICION for suspect in self._suspects), default=float("inf"))

    def begin(self, why: str, at: float) -> bool:
        """Take in a warning; return whether it is the first.

        Args:
            why: who warned, such as ``SIGUSR1 on gpu7``.
            at: when, by the lead's monotonic clock.
        """
        if self.why:
            return False
        self.why, self.due = why, at + self.seconds
        for suspect in self._suspects:
            self._note(suspect.failure)
        self._suspects.clear()
        return True

    def begin_round(self) -> None:
        """Forget the workers of the last round; the warning stands."""
        self._left.clear()
        self._suspects.clear()
        self._stopping = False

    def takes(self, failure: Failure, at: float, *, exited: bool) -> bool:
        """Return whether a worker's end is a preemption's work, or may turn out to be, and so no
        failure.

        Args:
            failure: what the agent knows of it.
            at: when it began, by the lead's monotonic clock.
            exited: whether the worker has ended.
        """
        if self._stopping or (self._warning is None and not self.why):
            return False
        key = (failure.node_rank, failure.local_rank)
        leaves = failure.exit_code == PREEMPTED_EXIT_CODE or is_termination(failure)
        if self.why:
            if leaves or (self._left and failure.effect):
                self._note(failure)
            return key in self._left
        known = [
            suspect
            for suspect in self._suspects
            if (suspect.failure.node_rank, suspect.failure.local_rank) == key
        ]
        if leaves and not known:
            self._suspects.append(_Suspect(failure, at, exited=exited))
        for suspect in known:
            suspect.exited |= exited
        return leaves or bool(known)

    def end_round(self, judge: Judge) -> None:
        """Leave to the judge what was not explained so far, and what comes now that the workers are
        being stopped.
        """
        self.give_up(judge)
        self._stopping = True

    def give_up(self, judge: Judge, moment: float = float("inf")) -> None:
        """Hand the judge what no warning has explained in time, up to a moment of the lead's
        monotonic clock.
        """
        for suspect in [suspect for suspect in self._suspects if suspect.at + SUSPICION <= moment]:
            self._suspects.remove(suspect)
            judge.hear(suspect.failure, suspect.at, exited=suspect.exited)

    def _note(self, failure: Failure) -> None:
        self._left.add((failure.node_rank, failure.local_rank))
