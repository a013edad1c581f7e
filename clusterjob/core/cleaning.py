"""Find ended jobs that a user no longer needs, and remove them here and on their hosts.

A job is removed on its hosts first, then its directory here, then its record. So a job that a host
or an error keeps still has its record, and the next `clean` continues there.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clusterjob.backends import base
from clusterjob.backends.base import Cleaner, Leftover, Status
from clusterjob.core import polling
from clusterjob.core.listing import Listing, row_of
from clusterjob.core.record_index import ListedJob
from clusterjob.core.records import SEPARATOR, Record, Records, home
from clusterjob.core.times import parse_recorded
from clusterjob.errors import ClusterJobError, UsageError
from clusterjob.node.host_server import code_store
from clusterjob.node.system import files
from clusterjob.node.verdict import JobState


@dataclass(frozen=True)
class EndedJob:
    """A job to remove.

    Attributes:
        record: its record; an array is one record.
        state: its state; MIXED if an array's elements differ.
        size: bytes of its files, here and on its hosts.
        kept: why it must not be removed; empty if it can be.
    """

    record: Record
    state: str
    size: int = 0
    kept: str = ""


@dataclass(frozen=True)
class Wanted:
    """The ended jobs to find; None or an empty field selects all.

    Attributes:
        states: the states.
        older_than: seconds since the end.
        larger_than: bytes.
    """

    states: frozenset[JobState] = frozenset()
    older_than: int | None = None
    larger_than: int | None = None


def find(wanted: Wanted) -> tuple[list[EndedJob], int]:
    """Return the ended jobs that match, the newest first, and the bytes of unused code.

    Raises:
        RecordError: the records cannot be listed.
    """
    records = Records()
    jobs = Listing(records).jobs()
    known = {job.job_id: _recorded_at(records, job) for job in jobs}  # before new ends are saved
    polled = polling.statuses([record for job in jobs for record in job.open])
    owners = {record.job_id: job for job in jobs for record in job.open}
    for record, status in polled:
        owners[record.job_id].rows.append(row_of(record, _certain(record, status)))
    found = []
    for job in jobs:
        states = {JobState(row.state) for row in job.rows}
        if not all(state.final for state in states):
            continue
        if wanted.states and not states & wanted.states:
            continue
        ended = min(time.time(), known[job.job_id] if not job.open else _earliest_end(job))
        if wanted.older_than is not None and time.time() - ended < wanted.older_than:
            continue
        if (found_record := records.read(job.job_id)) is not None:
            found.append(EndedJob(found_record, _state_of(row.state for row in job.rows)))
    measured, code = measure(found)
    least = wanted.larger_than
    return [job for job in measured if least is None or job.kept or job.size > least], code


def named(wanted: Sequence[Record]) -> tuple[list[EndedJob], int]:
    """Return the jobs that a user names, and the bytes of unused code.

    Raises:
        UsageError: an element of an array is named, or a job has not ended.
    """
    found = []
    for record in {record.job_id: record for record in wanted}.values():
        if record.index is not None:
            raise UsageError(
                f"{record.job_id} is an element of an array and cannot be removed alone",
                f"`clusterjob clean {record.whole_id}` removes the array",
            )
        pairs = [(each, _certain(each, status)) for each, status in polling.statuses([record])]
        running = next((status for _, status in pairs if not status.state.final), None)
        if running is not None:
            reason = f" ({running.reason})" if running.reason else ""
            raise UsageError(
                f"job {record.job_id} is {running.state}{reason}: only ended jobs are removed",
                f"`clusterjob cancel {record.job_id}` ends it",
            )
        state = _state_of(str(status.state) for _, status in pairs)
        found.append(EndedJob(Records().find(record.job_id), state))
    return measure(found)


def measure(jobs: Sequence[EndedJob]) -> tuple[list[EndedJob], int]:
    """Return the jobs with their sizes and the reasons to keep them, and bytes of unused code."""
    elsewhere, code = _ask([job.record for job in jobs], remove=False)
    code += _unused_code({job.record.job_id for job in jobs}, remove=False)
    measured = []
    for job in jobs:
        left = elsewhere.get(job.record.job_id, Leftover())
        try:
            size = files.tree_size(_directory(job.record)) + left.size
            measured.append(replace(job, size=size, kept=left.kept))
        except ClusterJobError as error:
            measured.append(replace(job, kept=error.message))
    return measured, code


def remove(jobs: Sequence[EndedJob]) -> tuple[list[EndedJob], int]:
    """Remove jobs on their hosts and here; return them, and the bytes of removed code.

    In the result, a job that was not removed has `kept`.
    """
    removable = [job for job in jobs if not job.kept]
    elsewhere, code = _ask([job.record for job in removable], remove=True)
    records, done = Records(), []
    _remove_orphans(records)
    for job in jobs:
        kept = job.kept or elsewhere.get(job.record.job_id, Leftover()).kept
        if not kept:
            try:
                _remove_here(records, job.record)
            except (ClusterJobError, OSError) as error:
                kept = error.message if isinstance(error, ClusterJobError) else str(error)
        done.append(replace(job, kept=kept))
    return done, code + _unused_code((), remove=True)


def _unused_code(without: Collection[str], *, remove: bool) -> int:
    """Return the bytes of code on this machine that no job uses, apart from some jobs."""
    try:
        return code_store.clean(home(), without, remove=remove)
    except OSError:  # it stays for the next call
        return 0


def _certain(record: Record, status: Status) -> Status:
    """Return the status; UNKNOWN instead of an end that the job's hosts may correct."""
    if status.provisional or record.may_be_corrected:
        return replace(status, state=JobState.UNKNOWN, verdict=None)
    return status


def _state_of(states: Iterable[str]) -> str:
    distinct = set(states)
    return distinct.pop() if len(distinct) == 1 else "MIXED"


def _recorded_at(records: Records, job: ListedJob) -> float:
    """Return the time at which the last end of a job was recorded on this machine."""
    times = [0.0]
    for name in {job.job_id, *(row.job_id for row in job.rows)}:
        with contextlib.suppress(OSError):
            times.append((records.directory / f"{name}.json").stat().st_mtime)
    return max(times)


def _earliest_end(job: ListedJob) -> float:
    """Return the earliest possible end of a job whose end is seen only now.

    It is the time of the submit, by this machine's clock, and the duration, by the job's clock.
    """
    submitted = parse_recorded(job.submitted_at)
    durations = [row.seconds for row in job.rows]
    if submitted is None or None in durations:
        return time.time()
    return submitted.timestamp() + max(each for each in durations if each is not None)


def _ask(records: Sequence[Record], *, remove: bool) -> tuple[dict[str, Leftover], int]:
    """Ask the backends about ended jobs; a backend that fails keeps its jobs."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.backend, []).append(record)
    found: dict[str, Leftover] = {}
    code = 0
    for name, group in groups.items():
        try:
            backend = base.instance(name)
            if not isinstance(backend, Cleaner):
                continue
            left, unused = backend.clean(group, remove=remove)
        except ClusterJobError as error:
            left, unused = {record.job_id: Leftover(kept=error.message) for record in group}, 0
        except (OSError, AttributeError, LookupError, TypeError, ValueError) as error:
            why = f"its record cannot be used ({type(error).__name__}: {error})"
            left, unused = {record.job_id: Leftover(kept=why) for record in group}, 0
        found |= left
        code += unused
    return found, code


def _directory(record: Record) -> Path:
    """Return the directory to remove, which is always that of this job below ``jobs``.

    Raises:
        ClusterJobError: the record names another directory, or the directory is a link.
    """
    own = home() / "jobs" / record.job_id
    try:
        same = os.path.realpath(record.job_dir.parent) == os.path.realpath(own.parent)
        if not same or record.job_dir.name != record.job_id or record.job_id.startswith("."):
            raise ClusterJobError(
                f"its directory {record.job_dir} is not in {own.parent}: remove it manually"
            )
        if own.is_symlink():
            raise ClusterJobError(f"its directory {own} is a link: remove it manually")
    except (OSError, ValueError) as error:
        raise ClusterJobError(f"its directory cannot be examined: {error}") from error
    return own


def _remove_here(records: Records, record: Record) -> None:
    """Remove a job's directory and its records on this machine.

    Raises:
        ClusterJobError: the record names another directory.
        OSError: the directory or a record cannot be removed.
    """
    files.remove_tree(_directory(record))
    if record.array is not None:
        for index in record.array["indices"]:
            records.delete(f"{record.job_id}{SEPARATOR}{index}")
    records.delete(record.job_id)


def _remove_orphans(records: Records) -> None:
    """Remove records of elements whose array was removed while their ends were written."""
    for name in records.names():
        whole, separator, _ = name.rpartition(SEPARATOR)
        with contextlib.suppress(OSError):
            if separator and not records.has(whole):
                records.delete(name)
