"""How a job of Slurm's stands: what its directory tells comes first, then Slurm's row of it, then
what is left to say.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

from clusterjob.backends import shared
from clusterjob.backends.base import Status
from clusterjob.backends.slurm import job_end as slurm_ends
from clusterjob.backends.slurm import queue
from clusterjob.backends.slurm.queue import Row, Snapshot
from clusterjob.core.records import Handle, Record, Records
from clusterjob.node.logs import ends
from clusterjob.node.verdict import JobState, Verdict

if TYPE_CHECKING:
    from clusterjob.backends.slurm.login_host import Login

NAME = "slurm"
SETTLING = 2.0  # seconds that an accepted job may take to be shown by squeue
_SUBMIT_TIME = (
    120.0  # seconds between Slurm's submit time and ours, the clocks' difference included
)
_UNTOLD = "scancel.pending"  # in a job's directory: Slurm did not answer when the job was cancelled
_UNSEEN_ALIVE = "Slurm does not show it, and it gave a sign of life less than a minute ago"
_UNSEEN = 120.0  # seconds after which a job that Slurm has never shown did not get there


class Cluster(NamedTuple):
    """What tells the clusters of jobs apart: the configuration, the name in a federation, the login
    host.
    """

    conf: str | None
    cluster: str | None
    login: Login | None


def cluster_of(record: Record) -> Cluster:
    """Return where a job is to be asked for."""
    data: Mapping[str, Any] = record.handle.data if record.handle is not None else {}
    login = None
    if record.spec.get("login"):
        from clusterjob.backends.slurm.login_host import of_record

        login = of_record(record)
    return Cluster(data.get("conf"), data.get("cluster"), login=login)


def by_directory(records: Sequence[Record]) -> tuple[dict[str, Status], list[Record]]:
    """Return the ends of the jobs whose directories tell them for good, and the other jobs."""
    found: dict[str, Status] = {}
    others = []
    for record in records:
        verdict = told(record)
        if verdict is not None and slurm_ends.settled(verdict, record.job_dir):
            found[record.job_id] = shared.ended(verdict)
        else:
            others.append(record)
    return found, others


def unreached(record: Record, why: str) -> Status:
    """Return the status of a job whose login host does not answer."""
    started_at, restarts, _ = shared.progress(record.job_dir)
    return Status(JobState.UNKNOWN, why, verdict=None, started_at=started_at, restarts=restarts)


def is_of(row: Row, record: Record, handle: Handle) -> bool:
    """Return whether a row with the job's id is this very job's: Slurm may give an id again to
    another (submitit#1660).

    The comment and the working directory bear our own id. Where a site has changed both, the name
    and the submit time tell.
    """
    if queue.bears_id(row, record.whole_id):
        return True
    at = handle.data["at"] + handle.data.get("ahead", 0.0)  # by the cluster's clock
    return row.name == record.name and abs(row.submitted - at) < _SUBMIT_TIME


def is_active(snapshot: Snapshot, record: Record, handle: Handle) -> bool:
    """Return whether Slurm shows this very job, and it waits or runs."""
    row = snapshot.rows.get(handle.id)
    return row is not None and row.active and is_of(row, record, handle=handle)


def is_of_another(snapshot: Snapshot, record: Record, handle: Handle) -> bool:
    """Return whether Slurm has given the job's id to another job, which is not to be cancelled in
    its place.
    """
    row = snapshot.rows.get(handle.id)
    return row is not None and not is_of(row, record, handle=handle)


def adopt(record: Record, snapshot: Snapshot, wholes: dict[str, Record]) -> Handle | None:
    """Return the handle of a job whose submitter could not note it: found by its comment.

    Args:
        record: the job.
        snapshot: the queue.
        wholes: the arrays that were looked for already, for all of their elements.
    """
    if record.index is None:
        return _adopted(record, snapshot).handle
    whole = record.whole_id
    if whole not in wholes:
        wholes[whole] = _adopted(Records().find(whole), snapshot)
    return wholes[whole].element(record.index).handle


def _adopted(record: Record, snapshot: Snapshot) -> Record:
    bases = sorted(
        {row.base for row in queue.rows_of(snapshot, record.job_id)}, key=int
    )  # in the order of submission
    if not bases:
        return record
    login = cluster_of(record).login
    more = {"login": login.to_json()} if login is not None else {}
    data = {"ids": bases, "cluster": None, "conf": None, "at": _epoch(record.submitted_at), **more}
    return replace(record, handle=Handle(NAME, bases[0], data=data))


def has_news(record: Record) -> bool:
    """Return whether the job's directory tells of an end that only Slurm can explain."""
    by_srun = _started_by_srun(record) and slurm_ends.step_code(record.job_dir) is not None
    return (
        by_srun
        or ends.cancelled(record.job_dir)
        or slurm_ends.verdict_of(record.job_dir) is not None
    )


def told(record: Record) -> Verdict | None:
    """Return how the job ended as its directory tells it: the agents' verdict; where srun started
    the workers, its success.
    """
    if _started_by_srun(record):
        return (
            slurm_ends.of_step(record.job_dir, 0, started_at=None)
            if slurm_ends.step_code(record.job_dir) == 0
            else None
        )
    return slurm_ends.verdict_of(record.job_dir)


def unseen(record: Record, snapshot: Snapshot) -> Status:
    """Return the status of a job without a handle that Slurm does not show."""
    if record.submitter is not None and record.submitter.alive():
        return Status(JobState.PENDING, "it is being submitted")
    if snapshot.trouble:
        return Status(JobState.UNKNOWN, _unanswered(snapshot))
    started_at, restarts, _ = shared.progress(record.job_dir)
    newest = max(
        _epoch(record.submitted_at) + _UNSEEN, _epoch(started_at) + SETTLING if started_at else 0.0
    )
    if started_at is not None and snapshot.taken_at < newest:
        return Status(JobState.RUNNING, "", verdict=None, started_at=started_at, restarts=restarts)
    if _runs_unseen(record, snapshot):
        return Status(
            JobState.UNKNOWN, _UNSEEN_ALIVE, verdict=None, started_at=started_at, restarts=restarts
        )
    if _ran(record, started_at):
        return _with_handle(_from_directory(record, started_at, restarts=restarts), None)
    if snapshot.taken_at < newest:
        return Status(
            JobState.UNKNOWN,
            "Slurm does not show it (yet): it was not known whether it had been taken",
        )
    why = "the command that submitted it died before Slurm had taken the job"
    return shared.ended(shared.end_without_lead(record.job_dir, None, restarts=0, otherwise=why))


def _ran(record: Record, started_at: str | None) -> bool:
    return (
        started_at is not None
        or slurm_ends.step_code(record.job_dir) is not None
        or bool(ends.refusals(record.job_dir))
    )


def not_yet(record: Record, snapshot: Snapshot) -> Status:
    """Return the status of a job of which Slurm was not, or could not be, asked since it was
    submitted.
    """
    started_at, restarts, waiting = shared.progress(record.job_dir)
    trouble = _unanswered(snapshot) if snapshot.trouble else ""
    state = JobState.RUNNING if started_at else JobState.UNKNOWN if trouble else JobState.PENDING
    return Status(state, trouble or waiting, verdict=None, started_at=started_at, restarts=restarts)


def from_row(record: Record, handle: Handle, row: Row) -> Status:
    """Return the status of a job that Slurm shows."""
    started_at, restarts, waiting = shared.progress(record.job_dir)
    own, wished = slurm_ends.verdict_of(record.job_dir), ends.cancelled(record.job_dir)
    if row.waiting:
        again = (
            f"queued again, it was {own.state.value.lower()} before; " if own is not None else ""
        )
        if wished:
            return Status(
                JobState.PENDING,
                "it is being cancelled",
                verdict=None,
                started_at=started_at,
                restarts=restarts,
                handle=handle,
            )
        when = f"; expected to start at {row.start}" if row.start else ""
        return Status(
            JobState.PENDING,
            f"{again}{row.reason or 'queued'}{when}",
            verdict=None,
            started_at=started_at,
            restarts=restarts,
            handle=handle,
        )
    # Slurm marks a job before it signals it: while it says RUNNING, nobody has cancelled what has
    # failed.
    if (
        row.state == "RUNNING"
        and not wished
        and own is not None
        and own.state is JobState.FAILED
        and slurm_ends.by_a_node(own)
    ):
        return _with_handle(own, handle)
    if row.active:
        return Status(
            JobState.RUNNING,
            waiting,
            verdict=None,
            started_at=started_at,
            restarts=restarts,
            handle=handle,
        )
    if own is None:
        code = slurm_ends.step_code(record.job_dir)
        if code is not None and _started_by_srun(record) and row.state in ("COMPLETED", "FAILED"):
            own = slurm_ends.of_step(record.job_dir, code, started_at=started_at)
    verdict = slurm_ends.of_slurm(row, own, job_dir=record.job_dir, started_at=started_at)
    if own is None and (wished or not slurm_ends.explains(row)):
        verdict = shared.end_without_lead(
            record.job_dir, started_at, restarts=restarts, otherwise=verdict
        )
    return _with_handle(verdict, handle)


def needs_explanation(record: Record, row: Row) -> bool:
    """Return whether Slurm is to be asked what a row leaves open: which signal ended the batch
    script, which node failed.

    A signal explains only an end that the batch script could not write. An end on record is not
    asked for again.
    """
    if row.state == "FAILED":
        return slurm_ends.step_code(record.job_dir) is None
    return record.end is None


def with_trouble(status: Status, snapshot: Snapshot) -> Status:
    """Say of a job that has not ended, as Slurm had it a while ago, that Slurm does not answer now."""
    if status.verdict is not None or not snapshot.trouble:
        return status
    return replace(status, reason="; ".join(filter(None, (status.reason, _unanswered(snapshot)))))


def _unanswered(snapshot: Snapshot) -> str:
    return f"Slurm does not answer: {snapshot.trouble}"


def _with_handle(verdict: Verdict, handle: Handle | None) -> Status:
    lost = verdict.state is JobState.LOST  # for want of a word of its end, which may come later
    return Status(
        verdict.state,
        verdict.reason,
        verdict=verdict,
        started_at=verdict.started_at,
        restarts=verdict.restarts,
        handle=handle,
        provisional=lost,
    )


def has_agents(record: Record) -> bool:
    """Return whether agents of the job see the request to cancel it, in its directory."""
    return not _started_by_srun(record) and (
        ends.cancelled(record.job_dir) or bool(record.spec.get("login"))
    )


def note_untold(record: Record) -> None:
    """Note that Slurm is still to be told of a cancel."""
    with contextlib.suppress(OSError):
        (record.job_dir / _UNTOLD).touch(0o600)


def is_untold(record: Record) -> bool:
    """Return whether Slurm is still to be told of a cancel."""
    return (record.job_dir / _UNTOLD).exists()


def note_told(record: Record) -> None:
    """Note that Slurm was told of a cancel."""
    with contextlib.suppress(OSError):
        (record.job_dir / _UNTOLD).unlink(missing_ok=True)


def _started_by_srun(record: Record) -> bool:
    return bool(record.spec.get("launcher") == "srun")


def submitted_in(record: Record) -> str:
    """Return the end of the directory in which sbatch was run, by which accounting tells a job from
    another of the same id.
    """
    if record.spec.get("login"):
        return f"/jobs/{record.whole_id}"  # below what only the cluster knows
    return str(record.job_dir if record.index is None else record.job_dir.parent.parent)


def _runs_unseen(record: Record, snapshot: Snapshot) -> bool:
    """Return whether a job that Slurm does not show is still to be waited for: nothing says its
    end, and its lease has not expired.
    """
    ended = (
        slurm_ends.step_code(record.job_dir) is not None
        or slurm_ends.verdict_of(record.job_dir) is not None
    )
    return not ended and slurm_ends.alive(record.job_dir, snapshot.taken_at)


def forgotten(record: Record, handle: Handle, accounted: Row | None, snapshot: Snapshot) -> Status:
    """Return the status of a job that squeue does not know any more: what it wrote itself, then
    what accounting has.
    """
    if accounted is not None:
        return from_row(record, handle, row=accounted)
    started_at, restarts, _ = shared.progress(record.job_dir)
    if _runs_unseen(record, snapshot):
        return Status(
            JobState.UNKNOWN, _UNSEEN_ALIVE, verdict=None, started_at=started_at, restarts=restarts
        )
    return _with_handle(_from_directory(record, started_at, restarts=restarts), handle)


def _from_directory(record: Record, started_at: str | None, restarts: int) -> Verdict:
    own = slurm_ends.verdict_of(record.job_dir)
    code = slurm_ends.step_code(record.job_dir)
    if own is None and code is not None and _started_by_srun(record):
        own = slurm_ends.of_step(record.job_dir, code, started_at=started_at)
    if own is None:
        why = "Slurm does not know it any more, and it left no verdict: it was killed, or lost by Slurm"
        own = shared.end_without_lead(record.job_dir, started_at, restarts=restarts, otherwise=why)
    return own


def _epoch(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(timezone.utc).timestamp()
