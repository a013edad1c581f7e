"""How a job on bare hosts stands: from what its hosts said last, and what of it has come into its directory here."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clusterjob.backends import Status, directory
from clusterjob.errors import HostError
from clusterjob.node import ends
from clusterjob.node.verdict import JobState, Verdict
from clusterjob.records import Record


@dataclass
class Node:
    """What is known of one node of a job that is asked after."""

    mirror: Any
    look: Mapping[str, Any] | None = None
    error: HostError | None = None
    asking: Future[Any] | None = None
    failures: int = 0
    next_try: float = 0.0


@dataclass
class Job:
    """A job that is asked after, once or again and again."""

    place: Any
    nodes: list[Node]
    followed: bool = False
    looked: bool = False


def status(record: Record, job: Job) -> Status:
    """Return how a job stands, by the newest answers of its hosts."""
    job_dir = record.job_dir
    told = ends.read_result(job_dir)
    if told is not None:
        return directory.ended(told)
    started_at, restarts, waiting = directory.progress(job_dir)
    errors = [node.error.message for node in job.nodes if node.error is not None]
    alive = [bool(node.look and node.look["alive"]) for node in job.nodes]
    being_submitted = record.handle is None and record.submitter is not None and record.submitter.alive()
    if being_submitted:
        return Status(JobState.PENDING, "it is being submitted", None, started_at, restarts)
    adopted = _verdict_of_members(job_dir)
    if adopted is not None:
        return directory.ended(adopted)
    lead = job.nodes[0]
    if lead.error is None and lead.look is not None:
        if alive[0]:
            state = JobState.RUNNING if started_at else JobState.PENDING
            return Status(state, "; ".join([*errors, *([waiting] if waiting else [])]), None, started_at, restarts)
    elif any(alive[1:]) or any(node.error is not None or node.look is None for node in job.nodes[1:]) or len(job.nodes) == 1:
        return Status(JobState.UNKNOWN, "; ".join(errors) or "its hosts have not answered yet", None, started_at, restarts)
    if lead.error is not None:
        others = next((str(end["reason"]) for end in ends.written(job_dir) if end.get("reason")), "they ended without a verdict")
        text = f"{lead.error.message}; the other nodes have ended: {others}"
        verdict = directory.end_without_lead(job_dir, started_at, restarts, text)
        return _guessed(replace(verdict, reason=text) if verdict.state is JobState.LOST else verdict)
    if any(alive):
        return Status(JobState.RUNNING, "node 0 has ended; the others are ending", None, started_at, restarts)
    if record.handle is None:
        why = "the command that submitted it died before the job had started"
    elif not all(node.look and node.look["known"] for node in job.nodes):
        why = "its directory is gone from its hosts"
    else:
        why = "its agents ended without a verdict: they were killed, or the hosts were restarted"
    verdict = directory.end_without_lead(job_dir, started_at, restarts, why)
    return _guessed(verdict) if errors else directory.ended(verdict)


def _guessed(verdict: Verdict) -> Status:
    """Return the status of a job whose end some host may know better: LOST until that host is reached."""
    return replace(directory.ended(verdict), provisional=verdict.state is JobState.LOST)


def _verdict_of_members(job_dir: Path) -> Verdict | None:
    """Return the lead's verdict as another node wrote it down, where node 0's own word has not come through."""
    for end in ends.written(job_dir):
        if end.get("state") in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED) and "exit_code" in end and "restarts" in end:
            try:
                return Verdict.from_json(end)
            except ValueError:
                continue  # what a host has sent is no verdict
    return None
