"""The events that a job notifies about, as facts and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from clusterjob.node.notifications import END, FAILURE, REQUEUE, START
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import Failure, JobState, Verdict

_MAX_TEXT = 500  # characters of an error


@dataclass(frozen=True)
class Event:
    """One event of a job.

    Attributes:
        event: one of `clusterjob.node.notifications.KINDS`.
        job_id, name, cluster: the job.
        state: the job's state, or RESTARTING.
        reason: one line; the first failure of a failed job.
        exit_code: the job's exit code; None before its end.
        seconds: seconds since node 0's agent started; None if unknown.
        rank: rank of the worker that failed first; None for another cause.
        host: host of that worker or node; may be empty.
        final: whether the attempt has ended.
    """

    event: str
    job_id: str
    name: str = ""
    cluster: str = ""
    state: str = ""
    reason: str = ""
    exit_code: int | None = None
    seconds: float | None = None
    rank: int | None = None
    host: str = ""
    final: bool = False

    def wanted(self, kinds: Sequence[str]) -> bool:
        """Return whether one of the kinds of --notify-on includes the event.

        ``end`` includes a failed end.
        """
        return self.event in kinds or (self.final and self.event == FAILURE and END in kinds)

    def title(self) -> str:
        """Return a line such as ``train-abc123 FAILED``."""
        return f"{self.job_id} {self.state}"

    def text(self) -> str:
        """Return the message: the job and its state, the reason, and the command for its logs."""
        job = f"{self.name} ({self.job_id})" if self.name else self.job_id
        first = f"{job}{f' on {self.cluster}' if self.cluster else ''}: {self.state}"
        if self.exit_code:
            first += f", exit code {self.exit_code}"
        if self.seconds is not None and self.event != START:
            first += f", after {duration(self.seconds)}"
        lines = [first, *([self.reason] if self.reason else []), f"clusterjob logs {self.job_id}"]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the facts, the title and the text as plain data."""
        return asdict(self) | {"title": self.title(), "text": self.text()}


def short(text: str) -> str:
    """Return one harmless line of at most 500 characters."""
    line = sanitize(" ".join(text.split()))
    return line if len(line) <= _MAX_TEXT else f"{line[: _MAX_TEXT - 3]}..."


def of_verdict(verdict: Verdict, **job: Any) -> Event:
    """Return the event of a verdict; `job` holds the other fields."""
    event = END
    if verdict.state in (JobState.FAILED, JobState.LOST):
        event = FAILURE
    elif verdict.state is JobState.PREEMPTED:
        event = REQUEUE
    return Event(
        event,
        state=str(verdict.state),
        reason=short(verdict.reason),
        exit_code=verdict.exit_code,
        final=True,
        **place_of(verdict.failure),
        **job,
    )


def place_of(failure: Failure | None) -> dict[str, Any]:
    """Return the fields of an event that name the failed worker."""
    return {"rank": failure.rank, "host": short(failure.host)} if failure else {}


def duration(seconds: float) -> str:
    """Return a duration such as ``45 s``, ``12 min`` or ``2 h 5 min``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
