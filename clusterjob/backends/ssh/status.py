"""Compute the status of an SSH job from its hosts' last answers and its mirrored files."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from clusterjob.backends import job_progress, shared
from clusterjob.backends.base import Status
from clusterjob.core.records import Record
from clusterjob.errors import HostError
from clusterjob.node.logs import ends
from clusterjob.node.logs.events import counted_files, now
from clusterjob.node.logs.job_dir import events_node
from clusterjob.node.verdict import JobState, Verdict

if TYPE_CHECKING:
    from clusterjob.remote.mirror import JobMirror
    from clusterjob.remote.sessions import Place


@dataclass
class Node:
    """The polls of one node of a job.

    Attributes:
        mirror: copies the node's files.
        answer: the newest answer of its host.
        error: the error of the newest poll; None if it succeeded.
        polling: the running poll.
        failures: number of failed polls since the last success.
        next_try: earliest time of the next poll, in monotonic seconds.
    """

    mirror: JobMirror
    answer: Mapping[str, Any] | None = None
    error: HostError | None = None
    polling: Future[Any] | None = None
    failures: int = 0
    next_try: float = 0.0


@dataclass
class Job:
    """The polls of a job.

    Attributes:
        place: its hosts.
        nodes: its nodes.
        followed: whether polls also copy the logs.
        polled: whether the first poll of all hosts has ended.
    """

    place: Place
    nodes: list[Node]
    followed: bool = False
    polled: bool = False


def status(record: Record, job: Job) -> Status:
    """Return the status of a job from the newest answers of its hosts."""
    job_dir = record.job_dir
    if (result := ends.read_result(job_dir)) is not None:
        return shared.ended(result)
    progress = job_progress.progress(job_dir)
    errors = [node.error.message for node in job.nodes if node.error is not None]
    alive = [bool(node.answer and node.answer["alive"]) for node in job.nodes]
    if record.handle is None and shared.being_submitted(record):
        return progress.status(JobState.PENDING, "it is being submitted")
    written = ends.written(job_dir)
    first = coordinator_node(record, len(job.nodes))
    if (own := _verdict_in([end for end in written if end["node_rank"] == first])) is not None:
        return shared.ended(own)
    node0 = job.nodes[first]  # with the coordinator
    others = [node for node in job.nodes if node is not node0]
    others_alive = any(node.answer and node.answer["alive"] for node in others)
    reached = node0.error is None and node0.answer is not None
    if reached and alive[first]:
        return progress.status(
            JobState.RUNNING if progress.started_at else JobState.PENDING,
            "; ".join(filter(None, (*errors, progress.waiting))),
            clock=None if node0.answer is None else node0.answer.get("clock"),
        )
    recorded = _verdict_in(written)
    if recorded is not None and not others_alive:
        return shared.ended(recorded) if reached and not errors else _until_reached(recorded)
    others_unknown = not others or any(
        node.error is not None or node.answer is None for node in others
    )
    if not reached and (others_alive or others_unknown):
        return progress.status(
            JobState.UNKNOWN, "; ".join(errors) or "its hosts have not answered yet"
        )
    if node0.error is not None:
        why = next(
            (str(end["reason"]) for end in written if end.get("reason")),
            "they ended without a verdict",
        )
        text = f"{node0.error.message}; the other nodes have ended: {why}"
        verdict = shared.verdict_without_coordinator(job_dir, progress, otherwise=text)
        return _until_reached(
            replace(verdict, reason=text) if verdict.state is JobState.LOST else verdict
        )
    if any(alive):
        return progress.status(
            JobState.RUNNING, f"node {first} has ended; the other nodes are ending"
        )
    if record.handle is None:
        why = "the command that submitted it died before the job had started"
    elif not all(node.answer and node.answer["known"] for node in job.nodes):
        why = "its directory is gone from its hosts"
    else:
        why = "its agents ended without a verdict: they were killed, or the hosts were restarted"
    verdict = shared.verdict_without_coordinator(job_dir, progress, otherwise=why)
    # The answers of unreachable hosts may replace LOST.
    return replace(
        shared.ended(verdict), provisional=bool(errors) and verdict.state is JobState.LOST
    )


def coordinator_node(record: Record, nodes: int) -> int:
    """Return the node of a job's coordinator, by the last file of events.

    Without restarts it is node 0: no other host can claim it.
    """
    if not (record.job.max_restarts or record.job.spares or record.job.min_nodes):
        return 0
    return min(events_node(counted_files(record.job_dir)[-1].name) or 0, nodes - 1)


def _until_reached(verdict: Verdict) -> Status:
    """Return a provisional status from some hosts; the other hosts' answers may replace it."""
    # `Record.may_be_corrected` compares the end time with this machine's clock. A host may report
    # any time, so do not use its end time.
    return replace(shared.ended(replace(verdict, ended_at=now())), provisional=True)


def _verdict_in(written: Sequence[Mapping[str, Any]]) -> Verdict | None:
    """Return the verdict in the nodes' ends; a success only if all nodes succeeded."""
    verdicts = []
    for end in written:
        if (
            end.get("state") in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)
            and "exit_code" in end
            and "restarts" in end
        ):
            with contextlib.suppress(ValueError):  # the host sent an invalid verdict
                verdicts.append(Verdict.from_json(end))
    if not verdicts:
        return None
    worst = next(
        (verdict for verdict in verdicts if verdict.state is not JobState.SUCCEEDED), verdicts[0]
    )
    if worst.state is JobState.SUCCEEDED and any(
        end.get("state") != JobState.SUCCEEDED for end in written
    ):
        return None
    return worst
