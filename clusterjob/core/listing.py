"""Build one row per job for `list` from the ended jobs and the status of the other jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from clusterjob.backends.base import Status
from clusterjob.core.record_index import (
    ListedJob,
    ListRow,
    RecordIndex,
    ended_row,
    place_in_list,
)
from clusterjob.core.records import Record
from clusterjob.core.selection import Selection


def row_of(record: Record, status: Status) -> ListRow:
    """Return the row of a job with this status."""
    if status.verdict is not None:
        row = ended_row(record, status.verdict)._replace(reason=status.reason.partition("\n")[0])
        return row._replace(seconds=None) if status.provisional else row
    handle = status.handle or record.handle
    number = handle.id if handle else ""
    return ListRow(
        record.job_id,
        str(status.state),
        exit_code="",
        nodes=str(record.nodes),
        cluster=record.cluster,
        submitted_at=record.submitted_at,
        reason="; ".join(_facts(status, number if number != record.job_id else "")),
        name=record.name,
        backend=record.backend,
        started_at=status.started_at or "",
        seconds=status.elapsed,
        backend_id=number,
        hosts=status.hosts,
        restarts=status.restarts,
        values=record.values_text,
    )


def _facts(status: Status, number: str) -> Iterator[str]:
    """Yield what is known of a job that has not ended: reason, id and nodes, restarts."""
    if reason := status.reason.partition("\n")[0]:
        yield reason
    if number:
        yield f"job {number} on {status.hosts}" if status.hosts else f"job {number}"
    if status.restarts:
        why = status.restart_reason.partition("\n")[0]
        yield f"restart {status.restarts}" + (f": {why}" if why else "")


class Listing(RecordIndex):
    """All jobs, with the status of those that are shown."""

    def select(
        self,
        selection: Selection,
        limit: int | None,
        ask: Callable[[Sequence[Record]], list[tuple[Record, Status]]],
    ) -> tuple[list[ListedJob], int]:
        """Return the newest selected jobs with a row for each, and how many more there are.

        Only jobs that may be shown are polled.

        Args:
            selection: which jobs.
            limit: maximum number of jobs; None for all.
            ask: returns the status of open jobs.
        """
        jobs = [
            job
            for job in self.jobs()
            if selection.fits(job.name, job.cluster, submitted_at=job.submitted_at)
        ]
        total = len(jobs)
        if not selection.states:
            jobs = jobs[:limit]
        owners = {record.job_id: job for job in jobs for record in job.open}
        if owners:
            asked = [record for job in jobs for record in job.open]
            for record, status in ask(asked):
                owners[record.job_id].rows.append(row_of(record, status))
        for job in jobs:
            job.rows.sort(key=place_in_list)
        if selection.states:
            jobs = [job for job in jobs if selection.has_state([row.state for row in job.rows])]
            total = len(jobs)
        return jobs[:limit], total - len(jobs[:limit])
