"""How a job stands as its directory tells it: what every backend reads whose jobs write, or are mirrored, into one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clusterjob.backends import Status
from clusterjob.node import ends
from clusterjob.node.events import now, read_events
from clusterjob.node.verdict import CANCELLED_EXIT_CODE, JobState, Verdict
from clusterjob.records import Record


def ended(verdict: Verdict) -> Status:
    """Return how a job stands that has ended."""
    return Status(verdict.state, verdict.reason, verdict, verdict.started_at, verdict.restarts)


def progress(job_dir: Path) -> tuple[str | None, int, str]:
    """Return when the workers first started (None before), how often they were started again, and what the job waits for."""
    started_at, restarts, waiting = None, 0, ""
    for event in read_events(job_dir / "events.jsonl"):
        kind = event.get("event")
        if kind == "started":
            started_at, restarts, waiting = started_at or event.get("time"), int(event.get("restart", 0)), ""
        elif kind == "waiting":
            waiting = f"waiting for node {', '.join(map(str, event.get('missing', [])))}"
        elif kind == "exec":
            waiting = str(event.get("why", ""))
    return started_at, restarts, waiting


def end_without_lead(record: Record, started_at: str | None, restarts: int) -> Verdict:
    """Return the end of a job whose lead wrote none: from what the nodes wrote, else LOST. Never a success."""
    common: dict[str, Any] = {"restarts": restarts, "started_at": started_at, "ended_at": now()}
    if ends.cancelled(record.job_dir):
        return Verdict(JobState.CANCELLED, CANCELLED_EXIT_CODE, "cancelled before its agents could say so", **common)
    for failure in ends.refusals(record.job_dir):
        return Verdict(JobState.FAILED, failure.exit_code, f"{failure.who}: {failure.message}", failure, **common)
    for end in ends.written(record.job_dir):
        if end.get("reason"):
            return Verdict(JobState.LOST, 1, str(end["reason"]), **common)
    if record.handle is None:
        return Verdict(JobState.LOST, 1, "the command that submitted it died before the job had started", **common)
    if not record.job_dir.exists():
        return Verdict(JobState.LOST, 1, f"its directory {record.job_dir} is gone", **common)
    return Verdict(JobState.LOST, 1, "its agents ended without a verdict: they were killed, or the machine was restarted", **common)
