"""The text of a job's phase, such as "importing torch" or "running 3m 20s on 2 of 3 nodes"."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from clusterjob.core.times import show_duration
from clusterjob.node.verdict import JobState

if TYPE_CHECKING:
    from clusterjob.backends.base import JobProgress, Status

SILENT = 5.0  # seconds without output after which the text says so
SLOW = 2.0  # seconds after which the text of a phase contains its time


def phase_text(status: Status, *, has_output: bool = False) -> str:
    """Return the phase of a job that has not ended, as text that changes only with the phase.

    Args:
        status: the job's status.
        has_output: whether its ranks have written output in this round.
    """
    from clusterjob.backends.base import JobPhase

    progress = status.progress
    if status.state is JobState.UNKNOWN:
        return status.reason or "its state is unknown"
    if progress is None:
        if status.state is JobState.PENDING:
            if status.reason.startswith("queued"):
                return status.reason
            return f"queued: {status.reason}" if status.reason else "starting the agents"
        begun = "running" if status.started_at or has_output else "starting the agents"
        return f"{begun}: {status.reason}" if status.reason else begun
    running = f"running on {progress.detail}" if progress.detail else "running"
    texts = {
        JobPhase.SETUP: progress.detail,
        JobPhase.NODES: "starting the agents"
        if progress.total == 1
        else _with_reason(f"{_counts(progress)} nodes joined", status.reason),
        JobPhase.IMPORT: "importing torch",
        JobPhase.START: running if has_output else f"{_ranks(progress.total)} started",
        JobPhase.RANKS: f"{_counts(progress)} ranks joined",
        JobPhase.RUNNING: running,
        JobPhase.STOP: _with_reason("stopping", progress.detail),
    }
    text = texts[progress.phase]
    if progress.phase is JobPhase.RANKS and progress.done == progress.total:
        text += ", forming the process group"
    return text


def _counts(progress: JobProgress) -> str:
    return f"{progress.done} of {progress.total or '?'}"


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"


def _with_reason(text: str, reason: str) -> str:
    return f"{text}: {reason}" if reason else text


class PhaseClock:
    """Times of one followed job, by this machine's monotonic clock.

    Attributes:
        has_output: whether output was seen in this round of the job's workers.
    """

    def __init__(self) -> None:
        self.has_output = False
        self._restarts = 0
        self._begin = self._heard_at = time.monotonic()
        self._phase = ""  # the first word of the text
        self._saw_begin = False  # whether an earlier phase was seen, so that `_begin` is right

    def hear(self) -> None:
        """Note that output has arrived."""
        self.has_output = True
        self._heard_at = time.monotonic()

    def text(self, status: Status) -> str:
        """Return the phase of a job with the time for which it has lasted, and its restarts."""
        moment = time.monotonic()
        if status.restarts != self._restarts:
            self._restarts, self.has_output = status.restarts, False
        text = phase_text(status, has_output=self.has_output)
        runs = text.startswith("running")
        phase = "running" if runs else str(status.progress and status.progress.phase)
        if phase != self._phase:
            self._saw_begin = bool(self._phase)
            self._phase, self._begin, self._heard_at = phase, moment, moment
        seconds = moment - self._begin
        restart = f", restart {status.restarts}" if status.restarts else ""
        if not runs:
            return text + restart + (f" ({show_duration(seconds)})" if seconds >= SLOW else "")
        known = None if status.progress is None else status.progress.seconds
        if known is not None or self._saw_begin:
            seconds = seconds if known is None else known
            text = text.replace("running", f"running {show_duration(seconds)}", 1)
        if moment - self._heard_at >= SILENT:
            text += f", no output for {show_duration(moment - self._heard_at)}"
        return text + restart
