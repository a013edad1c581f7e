"""The time limit of a job, which counts from when all workers run."""

from __future__ import annotations

import time
from math import inf


class TimeLimit:
    """The deadline of a job over all its rounds.

    Args:
        seconds: the limit; None for no limit.
        start_timeout: seconds after which a start counts as complete, if an import hangs.

    Attributes:
        due: the coordinator's monotonic time at which the job must end; infinity without a limit
            and before the first start.
        runs: whether the workers of all nodes have run.
    """

    def __init__(self, seconds: float | None, start_timeout: float) -> None:
        self._seconds = seconds
        self._start_timeout = start_timeout
        self.runs = False
        self.due = inf

    def start(self) -> None:
        """Record the first start of workers."""
        if self._seconds is not None:
            self.due = time.monotonic() + self._start_timeout + self._seconds

    def run(self) -> None:
        """Count from now, in the first round whose workers all run: the imports do not count."""
        if self._seconds is not None and not self.runs:
            self.due = time.monotonic() + self._seconds
        self.runs = True

    def resume(self, due: float, *, runs: bool) -> None:
        """Go on with the deadline of an earlier coordinator."""
        self.due, self.runs = due, runs
