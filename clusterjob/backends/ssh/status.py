"""How a job on bare hosts stands: from what its hosts said last, and what of it has come into its
directory here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from clusterjob.backends import shared
from clusterjob.backends.base import Status
from clusterjob.core.records import Record
from clusterjob.errors import HostError
from clusterjob.node.logs import ends
from clusterjob.node.logs.events import now
from clusterjob.node.verdict import JobState, Verdict


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
        return shared.ended(told)
    started_at, restarts, waiting = shared.progress(job_dir)
    errors = [node.error.message for node in job.nodes if node.error is not None]
    alive = [bool(node.look and node.look["alive"]) for node in job.nodes]
    being_submitted = (
        record.handle is None and record.submitter is not None and record.submitter.alive()
    )
    if being_submitted:
        return Status(
            JobState.PENDING,
            "it is being submitted",
            verdict=None,
            started_at=started_at,
            restarts=restarts,
        )
    written = ends.written(job_dir)
    own = _verdict_in([end for end in written if end["node_rank"] == 0])
    if own is not None:
        return shared.ended(own)
    lead = job.nodes[0]
    reached = lead.error is None and lead.look is not None
    if reached and alive[0]:
        state = JobState.RUNNING if started_at else JobState.PENDING
        return Status(
            state,
            "; ".join([*errors, *([waiting] if waiting else [])]),
            verdict=None,
            started_at=started_at,
            restarts=restarts,
        )
    told_others = _verdict_in(written)
    if told_others is not None and not any(alive[1:]):
        return shared.ended(told_others) if reached and not errors else _until_reached(told_others)
    others_unknown = (
        any(node.error is not None or node.look is None for node in job.nodes[1:])
        or len(job.nodes) == 1
    )
    if not reached and (any(alive[1:]) or others_unknown):
        return Status(
            JobState.UNKNOWN,
            "; ".join(errors) or "its hosts have not answered yet",
            verdict=None,
            started_at=started_at,
            restarts=restarts,
        )
    if lead.error is not None:
        others = next(
            (str(end["reason"]) for end in written if end.get("reason")),
            "they ended without a verdict",
        )
        text = f"{lead.error.message}; the other nodes have ended: {others}"
        verdict = shared.end_without_lead(job_dir, started_at, restarts=restarts, otherwise=text)
        return _until_reached(
            replace(verdict, reason=text) if verdict.state is JobState.LOST else verdict
        )
    if any(alive):
        return Status(
            JobState.RUNNING,
            "node 0 has ended; the others are ending",
            verdict=None,
            started_at=started_at,
            restarts=restarts,
        )
    if record.handle is None:
        why = "the command that submitted it died before the job had started"
    elif not all(node.look and node.look["known"] for node in job.nodes):
        why = "its directory is gone from its hosts"
    else:
        why = "its agents ended without a verdict: they were killed, or the hosts were restarted"
    verdict = shared.end_without_lead(job_dir, started_at, restarts=restarts, otherwise=why)
    return _guessed(verdict) if errors else shared.ended(verdict)


def _guessed(verdict: Verdict) -> Status:
    """Return the status of a job whose end some host may know better: LOST until that host is
    reached.
    """
    return replace(shared.ended(verdict), provisional=verdict.state is JobState.LOST)


def _until_reached(verdict: Verdict) -> Status:
    """Return the status of a job by what some of its hosts say: it holds until the others are
    reached.
    """
    # How long it may be corrected counts from here, not from a time that a host claims.
    return replace(shared.ended(replace(verdict, ended_at=now())), provisional=True)


def _verdict_in(written: Sequence[Mapping[str, Any]]) -> Verdict | None:
    """Return node 0's verdict as nodes wrote it down; a success only where no node says otherwise."""
    verdicts = []
    for end in written:
        if (
            end.get("state") in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)
            and "exit_code" in end
            and "restarts" in end
        ):
            try:
                verdicts.append(Verdict.from_json(end))
            except ValueError:
                continue  # what a host has sent is no verdict
    if not verdicts:
        return None
    worst = next(
        (verdict for verdict in verdicts if verdict.state is not JobState.SUCCEEDED), verdicts[0]
    )
    contradicted = any(end.get("state") != JobState.SUCCEEDED for end in written)
    return None if worst.state is JobState.SUCCEEDED and contradicted else worst
