"""Find the status of a Slurm job from its directory, then squeue, then accounting."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from clusterjob.backends import job_progress, shared
from clusterjob.backends.base import Status
from clusterjob.backends.slurm import job_end
from clusterjob.backends.slurm.squeue import JobRow, QueueSnapshot, has_id, rows_of
from clusterjob.core.records import Handle, Record, Records
from clusterjob.node.logs import ends
from clusterjob.node.system import files
from clusterjob.node.verdict import JobState, Verdict

if TYPE_CHECKING:
    from clusterjob.backends.slurm.login_host import Login

NAME = "slurm"
SETTLING = 2.0  # seconds until squeue shows an accepted job
# In a job's directory, this file means that Slurm did not answer the job's scancel.
_UNTOLD = "scancel.pending"
_UNSEEN_ALIVE = "Slurm does not show it, but its last heartbeat is less than a minute old"
_UNSEEN = 120.0  # seconds after which a job that Slurm has never shown counts as not submitted
_NEXT = re.compile(r"next\.(\d{1,9})", re.ASCII)
_JOB_NUMBER = re.compile(r"\d{1,11}", re.ASCII)


def next_job(job_dir: Path) -> tuple[str, float] | None:
    """Return the id and time of the newest job in the scheduler that continues this one.

    None if the job has the id of its first attempt.
    """
    matches = map(_NEXT.fullmatch, files.listed(str(ends.directory(job_dir))))
    newest = max((int(match[1]) for match in matches if match is not None), default=-1)
    path = ends.directory(job_dir) / f"next.{newest}"
    with contextlib.suppress(OSError, ValueError):
        number = files.read_regular(path, 64).decode(errors="replace").strip()
        if _JOB_NUMBER.fullmatch(number):
            return number, path.stat().st_mtime
    return None


class Cluster(NamedTuple):
    """The identity of a cluster: configuration, name in a federation, login host."""

    conf: str | None
    cluster: str | None
    login: Login | None


def cluster_of(record: Record) -> Cluster:
    """Return the cluster of a job."""
    data: Mapping[str, Any] = record.handle.data if record.handle is not None else {}
    login = None
    if record.job.login:
        from clusterjob.backends.slurm.login_host import of_record

        login = of_record(record)
    return Cluster(data.get("conf"), data.get("cluster"), login=login)


def by_directory(records: Sequence[Record]) -> tuple[dict[str, Status], list[Record]]:
    """Return the status of the jobs whose directory shows a final verdict, and the other jobs."""
    found: dict[str, Status] = {}
    others = []
    for record in records:
        verdict = directory_verdict(record)
        if verdict is not None and job_end.settled(verdict, record.job_dir):
            found[record.job_id] = shared.ended(verdict)
        else:
            others.append(record)
    return found, others


def at_newest_job(record: Record) -> Record:
    """Return the record with the handle of the newest job in Slurm.

    Where a site forbids a requeue, a job of --until-done submits another one for each attempt.
    """
    if record.handle is None or not record.job.until_done:
        return record
    if (found := next_job(record.job_dir)) is None:
        return record
    number, written = found
    data = {**record.handle.data, "ids": [number], "at": written}
    return replace(record, handle=replace(record.handle, id=number, data=data))


def jobs_in_queue(record: Record, snapshot: QueueSnapshot) -> list[str]:
    """Return Slurm's ids of all jobs that continue a job of --until-done and have not ended."""
    if record.index is not None or not record.job.until_done:
        return []
    return [row.key for row in rows_of(snapshot, record.job_id) if row.active]


def unreached(record: Record, why: str) -> Status:
    """Return the status of a job whose login host does not answer."""
    return job_progress.progress(record.job_dir).status(JobState.UNKNOWN, why)


def accepted_at(handle: Handle) -> float:
    """Return when Slurm accepted a job, in seconds since the epoch by the cluster's clock."""
    return float(handle.data["at"] + handle.data.get("ahead", 0.0))


def is_active(snapshot: QueueSnapshot, record: Record, handle: Handle) -> bool:
    """Return whether Slurm shows this job as waiting or running."""
    row = snapshot.rows.get(handle.id)
    return row is not None and row.active and has_id(row, record.whole_id)


def is_of_another(snapshot: QueueSnapshot, record: Record, handle: Handle) -> bool:
    """Return whether Slurm has given the job's id to another job, which must not be cancelled."""
    row = snapshot.rows.get(handle.id)
    return row is not None and not has_id(row, record.whole_id)


def adopt(record: Record, snapshot: QueueSnapshot, wholes: dict[str, Record]) -> Handle | None:
    """Find a job by its own id, and return the handle that its submitter did not store.

    Args:
        record: the job.
        snapshot: the queue.
        wholes: the arrays found so far, by id; a cache for calls with other elements.
    """
    if record.index is None:
        return _adopted(record, snapshot).handle
    whole = record.whole_id
    if whole not in wholes:
        wholes[whole] = _adopted(Records().find(whole), snapshot)
    return wholes[whole].element(record.index).handle


def _adopted(record: Record, snapshot: QueueSnapshot) -> Record:
    # In the order of submission.
    if not (bases := sorted({row.base for row in rows_of(snapshot, record.job_id)}, key=int)):
        return record
    data: dict[str, Any] = {
        "ids": bases,
        "cluster": None,
        "conf": None,
        "at": shared.epoch(record.submitted_at),
    }
    if (login := cluster_of(record).login) is not None:
        data["login"] = login.to_json()
    return replace(record, handle=Handle(NAME, bases[0], data=data))


def has_news(record: Record) -> bool:
    """Return whether the job's directory shows an end whose cause only Slurm knows."""
    return (
        ends.cancelled(record.job_dir)
        or job_end.verdict_of(record.job_dir) is not None
        or (_started_by_srun(record) and job_end.step_code(record.job_dir) is not None)
    )


def directory_verdict(record: Record) -> Verdict | None:
    """Return the verdict in the job's directory.

    The agents write the verdict. Under ``--launcher srun`` the directory shows only a success.
    """
    if not _started_by_srun(record):
        return job_end.verdict_of(record.job_dir)
    if job_end.step_code(record.job_dir) == 0:
        return job_end.of_step(record.job_dir, 0, started_at=None)
    return None


def unseen(record: Record, snapshot: QueueSnapshot) -> Status:
    """Return the status of a job without a handle that Slurm does not show."""
    if shared.being_submitted(record):
        return Status(JobState.PENDING, "it is being submitted")
    if snapshot.error:
        return Status(JobState.UNKNOWN, _unanswered(snapshot))
    progress = job_progress.progress(record.job_dir)
    expected = shared.epoch(record.submitted_at) + _UNSEEN  # Slurm shows the job by this time
    if progress.started_at:
        expected = max(expected, shared.epoch(progress.started_at) + SETTLING)
        if snapshot.taken_at < expected:
            return progress.status(JobState.RUNNING)
    if _may_run_unseen(record, snapshot):
        return progress.status(JobState.UNKNOWN, _UNSEEN_ALIVE)
    if (
        progress.started_at
        or job_end.step_code(record.job_dir) is not None
        or ends.refusals(record.job_dir)
    ):
        return _with_handle(_from_directory(record, progress), None)
    if snapshot.taken_at < expected:
        return Status(
            JobState.UNKNOWN,
            "Slurm does not show it (yet): it is unknown whether Slurm accepted it",
        )
    return shared.ended(
        shared.verdict_without_coordinator(
            record.job_dir,
            job_progress.Progress(),
            otherwise="the command that submitted it died before Slurm accepted the job",
        )
    )


def not_yet(record: Record, snapshot: QueueSnapshot) -> Status:
    """Return the status of a job if no query to Slurm has succeeded since its submission."""
    progress = job_progress.progress(record.job_dir)
    state = JobState.UNKNOWN if snapshot.error else JobState.PENDING
    return progress.status(
        JobState.RUNNING if progress.started_at else state,
        _unanswered(snapshot) if snapshot.error else progress.waiting,
    )


def from_row(record: Record, handle: Handle, row: JobRow) -> Status:
    """Return the status of a job that Slurm shows."""
    progress = job_progress.progress(record.job_dir)
    own, cancelled = job_end.verdict_of(record.job_dir), ends.cancelled(record.job_dir)
    if row.waiting:
        reason = row.reason or "queued"
        if own is not None:
            before = f"attempt {own.attempt} was {own.state.value.lower()}: {own.reason}"
            reason = f"waits for attempt {own.attempt + 1} ({before}); {reason}"
        if row.start:
            reason += f"; expected to start at {row.start}"
        return progress._replace(phase=None).status(
            JobState.PENDING, "it is being cancelled" if cancelled else reason, handle
        )
    # Slurm changes the state before it sends a signal. So while the state is RUNNING, a node's
    # failure is not the effect of a cancel.
    if (
        row.state == "RUNNING"
        and not cancelled
        and own is not None
        and own.state is JobState.FAILED
        and job_end.by_a_node(own)
    ):
        return _with_handle(own, handle)
    if row.active:
        attempt = f"attempt {progress.attempt}" if progress.attempt else ""
        now = progress.status(JobState.RUNNING, progress.waiting or attempt, handle)
        return replace(now, elapsed=row.ran, hosts=row.nodes)
    if own is None and row.state in ("COMPLETED", "FAILED"):
        own = _verdict_of_step(record, progress)
    verdict = job_end.of_slurm(row, own, job_dir=record.job_dir, started_at=progress.started_at)
    if own is None and (cancelled or not job_end.explains(row)):
        verdict = shared.verdict_without_coordinator(record.job_dir, progress, otherwise=verdict)
    return _with_handle(verdict, handle)


def needs_explanation(record: Record, row: JobRow) -> bool:
    """Return whether to query Slurm for the signal or failed node, which the row does not show.

    The signal is queried only if the batch script could not write its exit code, and the failed
    node only until the job's end is recorded.
    """
    if row.state == "FAILED":
        return job_end.step_code(record.job_dir) is None
    return record.end is None


def with_error(status: Status, snapshot: QueueSnapshot) -> Status:
    """Add "Slurm does not answer" to the status of a job that has not ended."""
    if status.verdict is not None or not snapshot.error:
        return status
    return replace(status, reason="; ".join(filter(None, (status.reason, _unanswered(snapshot)))))


def _unanswered(snapshot: QueueSnapshot) -> str:
    return f"Slurm does not answer: {snapshot.error}"


def _with_handle(verdict: Verdict, handle: Handle | None) -> Status:
    """Return the status for a verdict; LOST is provisional: Slurm may still report the real end."""
    return replace(shared.ended(verdict), handle=handle, provisional=verdict.state is JobState.LOST)


def has_agents(record: Record) -> bool:
    """Return whether the job's agents read the cancel request in its directory."""
    return not _started_by_srun(record) and (
        ends.cancelled(record.job_dir) or bool(record.job.login)
    )


def note_pending_cancel(record: Record) -> None:
    """Record that Slurm has not answered a cancel, so that the next status call repeats it."""
    with contextlib.suppress(OSError):
        (record.job_dir / _UNTOLD).touch(0o600)


def has_pending_cancel(record: Record) -> bool:
    """Return whether a cancel must be sent to Slurm again."""
    return (record.job_dir / _UNTOLD).exists()


def clear_pending_cancel(record: Record) -> None:
    """Remove the record of `note_pending_cancel`: Slurm has answered the cancel."""
    with contextlib.suppress(OSError):
        (record.job_dir / _UNTOLD).unlink(missing_ok=True)


def _started_by_srun(record: Record) -> bool:
    return record.job.launcher == "srun"


def submitted_in(record: Record) -> str:
    """Return the directory in which sbatch ran; for a login host, only the end of its path.

    In accounting, it distinguishes the job from another job with the same id.
    """
    return f"/jobs/{record.whole_id}" if record.job.login else str(record.whole_dir)


def _may_run_unseen(record: Record, snapshot: QueueSnapshot) -> bool:
    """Return whether a job that Slurm does not show may run: it has no end, and its lease holds."""
    return (
        job_end.step_code(record.job_dir) is None
        and job_end.verdict_of(record.job_dir) is None
        and job_end.alive(record.job_dir, snapshot.taken_at)
    )


def forgotten(
    record: Record, handle: Handle, accounted: JobRow | None, snapshot: QueueSnapshot
) -> Status:
    """Return the status of a job that squeue no longer shows, from accounting or its directory."""
    if accounted is not None:
        return from_row(record, handle, row=accounted)
    progress = job_progress.progress(record.job_dir)
    if _may_run_unseen(record, snapshot):
        return progress.status(JobState.UNKNOWN, _UNSEEN_ALIVE)
    return _with_handle(_from_directory(record, progress), handle)


def _from_directory(record: Record, progress: job_progress.Progress) -> Verdict:
    return (
        job_end.verdict_of(record.job_dir)
        or _verdict_of_step(record, progress)
        or shared.verdict_without_coordinator(
            record.job_dir,
            progress,
            otherwise="Slurm does not know it any more, and it left no verdict:"
            " it was killed, or lost by Slurm",
        )
    )


def _verdict_of_step(record: Record, progress: job_progress.Progress) -> Verdict | None:
    """Return the verdict of a job with --launcher srun from the exit code of its srun."""
    code = job_end.step_code(record.job_dir) if _started_by_srun(record) else None
    if code is None:
        return None
    return job_end.of_step(record.job_dir, code, started_at=progress.started_at)
