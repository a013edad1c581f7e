"""Compute the status of an SSH job from its hosts' last answers and its mirrored files."""

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
    """The poll state of one node of a job."""

    mirror: Any
    answer: Mapping[str, Any] | None = None
    error: HostError | None = None
    polling: Future[Any] | None = None
    failures: int = 0
    next_try: float = 0.0


@dataclass
class Job:
    """The poll state of a job."""

    place: Any
    nodes: list[Node]
    followed: bool = False
    looked: bool = False


def status(record: Record, job: Job) -> Status:
    """Return the status of a job from the newest answers of its hosts."""
    job_dir = record.job_dir
    result = ends.read_result(job_dir)
    if result is not None:
        return shared.ended(result)
    started_at, restarts, waiting = shared.progress(job_dir)
    errors = [node.error.message for node in job.nodes if node.error is not None]
    alive = [bool(node.answer and node.answer["alive"]) for node in job.nodes]
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
    node0 = job.nodes[0]
    reached = node0.error is None and node0.answer is not None
    if reached and alive[0]:
        state = JobState.RUNNING if started_at else JobState.PENDING
        return Status(
            state,
            "; ".join([*errors, *([waiting] if waiting else [])]),
            verdict=None,
            started_at=started_at,
            restarts=restarts,
        )
    recorded = _verdict_in(written)
    if recorded is not None and not any(alive[1:]):
        return shared.ended(recorded) if reached and not errors else _until_reached(recorded)
    others_unknown = (
        any(node.error is not None or node.answer is None for node in job.nodes[1:])
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
    if node0.error is not None:
        others = next(
            (str(end["reason"]) for end in written if end.get("reason")),
            "they ended without a verdict",
        )
        text = f"{node0.error.message}; the other nodes have ended: {others}"
        verdict = shared.verdict_without_coordinator(
            job_dir, started_at, restarts=restarts, otherwise=text
        )
        return _until_reached(
            replace(verdict, reason=text) if verdict.state is JobState.LOST else verdict
        )
    if any(alive):
        return Status(
            JobState.RUNNING,
            "node 0 has ended; the other nodes are ending",
            verdict=None,
            started_at=started_at,
            restarts=restarts,
        )
    if record.handle is None:
        why = "the command that submitted it died before the job had started"
    elif not all(node.answer and node.answer["known"] for node in job.nodes):
        why = "its directory is gone from its hosts"
    else:
        why = "its agents ended without a verdict: they were killed, or the hosts were restarted"
    verdict = shared.verdict_without_coordinator(
        job_dir, started_at, restarts=restarts, otherwise=why
    )
    return _inferred(verdict) if errors else shared.ended(verdict)


def _inferred(verdict: Verdict) -> Status:
    """Return an inferred status; LOST is provisional until the unreachable hosts answer."""
    return replace(shared.ended(verdict), provisional=verdict.state is JobState.LOST)


def _until_reached(verdict: Verdict) -> Status:
    """Return the provisional status from some hosts; the answers of other hosts may change it."""
    # The time limit for a correction uses this machine's clock, not a time that a host reports.
    return replace(shared.ended(replace(verdict, ended_at=now())), provisional=True)


def _verdict_in(written: Sequence[Mapping[str, Any]]) -> Verdict | None:
    """Return node 0's verdict from the nodes' records; a success only if no node differs."""
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
                continue  # the host sent an invalid verdict
    if not verdicts:
        return None
    worst = next(
        (verdict for verdict in verdicts if verdict.state is not JobState.SUCCEEDED), verdicts[0]
    )
    contradicted = any(end.get("state") != JobState.SUCCEEDED for end in written)
    return None if worst.state is JobState.SUCCEEDED and contradicted else worst
