"""Poll jobs for their status and logs, and wait for their ends."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from clusterjob.backends import base, shared
from clusterjob.backends.base import Status
from clusterjob.core.bad_hosts import BadHosts
from clusterjob.core.listing import Listing, row_of
from clusterjob.core.record_index import place_in_list
from clusterjob.core.records import Handle, Record, Records
from clusterjob.core.selection import Selection
from clusterjob.errors import AmbiguousId, ClusterJobError
from clusterjob.node.logs.log_files import LogLine, LogReader
from clusterjob.node.verdict import JobState, Verdict

_FIRST_PAUSE, _MAX_PAUSE = 0.02, 0.25  # first and maximum seconds between two polls of one job
_ARRAY = "an array"  # shown instead of a state: each element has its own state
_MAX_PAUSE_OF_MANY = 1.0  # maximum seconds between two polls of many jobs


def statuses(wanted: Sequence[Record]) -> list[tuple[Record, Status]]:
    """Return the status of jobs, with one query to each backend; save new ends in the records.

    Instead of an array, the result contains each of its elements.
    """
    records = Records()
    wanted = [element for record in wanted for element in records.elements(record)]
    found: dict[str, Status] = {}
    asked: dict[str, list[Record]] = {}
    for record in wanted:
        if record.verdict is not None and not record.may_be_corrected:
            found[record.job_id] = shared.ended(record.verdict)
        else:
            asked.setdefault(record.backend, []).append(record)
    for name, group in asked.items():
        found |= _ask(name, group)
    pairs = []
    arrays: dict[str, Handle] = {}
    for record in wanted:
        status = found.get(record.job_id, Status(JobState.UNKNOWN))
        if record.verdict is not None and (status.provisional or status.state is JobState.UNKNOWN):
            # Keep the recorded end, although it is provisional.
            status = shared.ended(record.verdict)
        if status.handle is not None and record.handle is None and record.index is None:
            record = records.with_handle(record, status.handle)  # noqa: PLW2901 - the same job
        elif status.handle is not None and record.handle is None:
            arrays[record.whole_id] = status.handle
        if (
            status.verdict is not None
            and status.state.final
            and status.verdict.to_json() != record.end
        ):
            record = records.with_end(  # noqa: PLW2901
                record, status.verdict.to_json(), provisional=status.provisional
            )
        if record.job_id in found and (status.restarts or status.verdict is not None):
            BadHosts(record.cluster).note(record)
        pairs.append((record, status))
    for whole_id, handle in arrays.items():
        records.with_handle(records.find(whole_id), replace(handle, id=handle.data["ids"][0]))
    return pairs


def with_states(error: AmbiguousId) -> AmbiguousId:
    """Add the states of the first 5 jobs to the error's hint and return the error.

    The error is unchanged if the states cannot be read.
    """
    records = Records()
    try:
        shown = [records.find(job_id) for job_id in error.ids[:5]]
        known = {
            record.whole_id: str(status.state)
            for record, status in statuses([one for one in shown if one.array is None])
        }
    except ClusterJobError:
        return error
    more = (
        f" and {len(error.ids) - len(shown)} more: `clusterjob list` shows them"
        if len(error.ids) > len(shown)
        else ""
    )
    error.hint = (
        "it could be "
        f"{', '.join(f'{one.job_id} ({known.get(one.job_id, _ARRAY)})' for one in shown)}"
        f"{more}"
    )
    return error


def _ask(name: str, group: Sequence[Record]) -> dict[str, Status]:
    """Query one backend for the status of jobs; a broken record makes only its own job UNKNOWN."""
    try:
        backend = base.instance(name)
    except ClusterJobError as error:  # the backend's package is not installed any more
        return {record.job_id: Status(JobState.UNKNOWN, error.message) for record in group}
    try:
        return backend.status(group)
    except (OSError, AttributeError, LookupError, TypeError, ValueError) as error:
        if len(group) > 1:
            return {
                job_id: status
                for record in group
                for job_id, status in _ask(name, [record]).items()
            }
        what = (
            f"{error.filename}: {error.strerror}"
            if isinstance(error, OSError)
            else f"{type(error).__name__}: {error}"
        )
        return {
            group[0].job_id: Status(
                JobState.UNKNOWN,
                f"its record or its directory {group[0].job_dir} cannot be read ({what})",
            )
        }


def unfinished() -> list[tuple[Record, Status]]:
    """Return the jobs that have not ended, with their status, oldest first."""
    pairs = statuses(Listing(Records()).open)
    return sorted(
        [(record, status) for record, status in pairs if not status.state.final],
        key=lambda pair: place_in_list(row_of(*pair)),
    )


def open_jobs(selection: Selection) -> list[Record]:
    """Return the selected jobs that have not ended, the newest first.

    Of an array whose elements differ in their state, the selected elements are returned.
    """
    listed = [
        job
        for job in Listing(Records()).jobs()
        if job.open and selection.fits(job.name, job.cluster, submitted_at=job.submitted_at)
    ]
    pairs = statuses([record for job in listed for record in job.open])
    order = {job.job_id: place for place, job in enumerate(listed)}
    return sorted(
        (
            record
            for record, now in pairs
            if (not now.state.final or record.provisional) and selection.has_state([now.state])
        ),
        key=lambda record: order[record.whole_id],
    )


def status(record: Record) -> Status:
    """Return the status of one job."""
    return statuses([record])[0][1]


def collect(record: Record) -> None:
    """Copy the logs that a job has written so far into its directory on this machine."""
    base.instance(record.backend).collect(record)


def follow(
    record: Record,
    show: Callable[[Iterable[list[LogLine]]], None],
    progress: Callable[[Status], None],
    reader: LogReader | None = None,
    *,
    logs: bool = True,
) -> Verdict:
    """Show a job's output while it is written, until the job ends; return the verdict.

    Args:
        record: the job.
        show: receives the new lines of one poll, in order, in small batches; a batch is empty if
            only an unfinished line has grown.
        progress: called with the status at each poll.
        reader: source of the lines; by default all lines of the job.
        logs: whether to fetch the logs, which takes time if they are on another machine.
    """
    reader = reader or LogReader(record.job_dir)
    pause = _FIRST_PAUSE
    while True:
        # The new record contains the end, which makes `collect` fetch the last lines.
        [(record, now)] = statuses([record])
        if logs:
            collect(record)
        batches = reader.batches(end=now.verdict is not None)
        first = next(batches, None)
        if first is not None:
            show(itertools.chain([first], batches))
        if now.verdict is not None:
            return now.verdict
        progress(now)
        pause = _FIRST_PAUSE if first is not None else min(_MAX_PAUSE, pause * 1.3)
        time.sleep(pause)


def wait_for_all(
    wanted: Sequence[Record],
    on_end: Callable[[Record, Status], None],
    show: Callable[[Record, bool], object] = lambda *_: None,
) -> int:
    """Wait until all jobs have ended; return the first exit code that is not 0, else 0.

    Args:
        wanted: the jobs, such as an array's elements; their order decides which code is "first".
        on_end: called with each job when its end is seen.
        show: called before that with each open job at each poll, and whether it has ended.
    """
    open_ = [element for record in wanted for element in Records().elements(record)]
    codes = dict.fromkeys((record.job_id for record in open_), 0)
    pause = _FIRST_PAUSE
    while True:
        pairs = statuses(open_)
        for record, now in pairs:
            show(record, now.verdict is not None)
        ended = [(record, now) for record, now in pairs if now.verdict is not None]
        for record, now in ended:
            on_end(record, now)
            codes[record.job_id] = now.verdict.exit_code if now.verdict is not None else 1
        open_ = [record for record, now in pairs if now.verdict is None]
        if not open_:
            return next((code for code in codes.values() if code), 0)
        pause = _FIRST_PAUSE if ended else min(_MAX_PAUSE_OF_MANY, pause * 1.3)
        time.sleep(pause)


def wait(record: Record, progress: Callable[[Status], None] = lambda _: None) -> Verdict:
    """Wait until a job has ended and return its verdict.

    Args:
        record: the job.
        progress: called with the status at each poll.
    """
    return follow(
        record,
        lambda _: None,
        progress=progress,
        reader=LogReader(record.job_dir, node=-1),
        logs=False,
    )
