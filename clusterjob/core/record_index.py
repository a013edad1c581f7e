"""Read all records into one row per ended job, with a cache for these rows.

Without the cache, reading 10,000 records takes over a second.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from clusterjob.core.records import SEPARATOR, Record, Records
from clusterjob.core.times import parse_recorded
from clusterjob.node.system import files
from clusterjob.node.verdict import JobState, Verdict

_CACHE = ".ended.json"  # in the directory of the records; no record's name begins with a dot
_SCHEMA = 3
# Inode, modification time (ns since the epoch) and size (bytes) of a record file.
Stamp = tuple[int, int, int]
_MANY = 50  # number of new rows after which the cache is rewritten


class ListRow(NamedTuple):
    """The row of a job, or of one element of an array, in the output of `list`."""

    job_id: str
    state: str
    exit_code: str  # empty before the end
    nodes: str
    cluster: str
    submitted_at: str
    reason: str
    name: str = ""
    backend: str = ""
    started_at: str = ""  # empty before the start
    ended_at: str = ""  # empty before the end
    seconds: float | None = None  # from the start of the workers; None if it is unknown
    backend_id: str = ""  # such as Slurm's job id
    hosts: str = ""  # the scheduler's list of its nodes, while it runs
    restarts: int = 0
    values: str = ""  # of an element of a sweep

    @property
    def array_id(self) -> str:
        """The id of the array that this element belongs to; empty for other jobs."""
        return self.job_id.rpartition(SEPARATOR)[0] if SEPARATOR in self.job_id else ""


def ended_row(record: Record, verdict: Verdict) -> ListRow:
    """Return the row of a job that has ended."""
    return ListRow(
        record.job_id,
        str(verdict.state),
        exit_code=str(verdict.exit_code),
        nodes=str(record.nodes),
        cluster=record.cluster,
        submitted_at=record.submitted_at,
        reason=verdict.reason.partition("\n")[0],
        name=record.name,
        backend=record.backend,
        started_at=verdict.started_at or "",
        ended_at=verdict.ended_at or "",
        seconds=None if record.provisional else seconds_of(verdict),
        backend_id=record.handle.id if record.handle else "",
        restarts=verdict.restarts,
        values=record.values_text,
    )


def seconds_of(verdict: Verdict) -> float | None:
    """Return how long the workers ran; None if it is unknown.

    Both times of a verdict are of one clock, except for LOST: its end is the time at which this
    machine noticed it.
    """
    if verdict.state is JobState.LOST:
        return None
    begin, end = parse_recorded(verdict.started_at), parse_recorded(verdict.ended_at)
    if begin is None or end is None or end < begin:
        return None
    return round((end - begin).total_seconds(), 3)


@dataclass
class ListedJob:
    """One job of a listing: the rows of its ended parts, and the records of its open parts.

    Attributes:
        job_id: the job's id; for the elements of an array, the array's id.
        name: the job's name.
        cluster: the job's cluster.
        submitted_at: time of the submit, RFC 3339.
        rows: the rows; one, or one per element of an array.
        open: the records whose status must be polled.
    """

    job_id: str
    name: str
    cluster: str
    submitted_at: str
    rows: list[ListRow] = field(default_factory=list)
    open: list[Record] = field(default_factory=list)


class RecordIndex:
    """All jobs: the rows of the ended jobs, and the records of the other jobs.

    Attributes:
        rows: jobs with a recorded verdict; each element of an array has a row.
        open: jobs, and elements of arrays, that have no verdict or a provisional one.
        broken: names of files in the record directory that are not valid records.
    """

    def __init__(self, records: Records) -> None:
        self.rows: list[ListRow] = []
        self.open: list[Record] = []
        self.broken: list[str] = []
        self._records = records
        self._stamps = dict(_stamps(records))
        self._cache_path = records.directory / _CACHE
        cached = self._load()
        self._known = {
            name: (stamp, row)
            for name, (stamp, row) in cached.items()
            if stamp == self._stamps.get(name)
            and (row.array_id or name) in self._stamps  # an element needs its array's record
        }
        self.rows += [row for _, row in self._known.values()]
        valid = len(self._known)
        for name in self._stamps:
            if name not in self._known and SEPARATOR not in name:
                self._add(name)
        if len(self._known) - valid > _MANY or len(cached) - len(self._known) > _MANY:
            self._save()

    def jobs(self) -> list[ListedJob]:
        """Return all jobs, the newest first; an array is one job."""
        found: dict[str, ListedJob] = {}
        for row in self.rows:
            whole = row.array_id or row.job_id
            if whole not in found:
                found[whole] = ListedJob(whole, row.name, row.cluster, row.submitted_at)
            found[whole].rows.append(row)
        for record in self.open:
            whole = record.whole_id
            if whole not in found:
                found[whole] = ListedJob(whole, record.name, record.cluster, record.submitted_at)
            found[whole].open.append(record)
        return sorted(found.values(), key=lambda job: (job.submitted_at, job.job_id), reverse=True)

    def _add(self, name: str) -> None:
        """Read a record file that is not in the cache, and add its job or its array elements."""
        record = self._records.read(name)
        if record is None:
            self.broken.append(f"{name}.json")
        elif record.array is None:
            self._add_row(record)
        else:
            for index in record.array["indices"]:
                element = f"{record.job_id}{SEPARATOR}{index}"
                if element not in self._known:
                    ended = self._records.read(element) if element in self._stamps else None
                    self._add_row(ended or record.element(index))

    def _add_row(self, record: Record) -> None:
        """Add an ended job to the rows and to the cache; add any other job to the open jobs."""
        verdict = record.verdict
        if verdict is None or record.may_be_corrected:
            self.open.append(record)
            return
        row = ended_row(record, verdict)
        self.rows.append(row)
        if record.job_id in self._stamps:
            self._known[record.job_id] = (self._stamps[record.job_id], row)

    def _load(self) -> dict[str, tuple[Stamp, ListRow]]:
        data = files.read_json(self._cache_path)
        try:
            if isinstance(data, dict) and data["schema"] == _SCHEMA:
                return {
                    name: ((inode, modified, size), ListRow(name, *row))
                    for name, (inode, modified, size, *row) in data["rows"].items()
                }
        except (KeyError, TypeError, ValueError, AttributeError):
            pass
        return {}

    def _save(self) -> None:
        rows = {name: (*stamp, *row[1:]) for name, (stamp, row) in self._known.items()}
        try:
            files.write_atomic(
                self._cache_path,
                json.dumps({"schema": _SCHEMA, "rows": rows}).encode(errors="surrogatepass"),
            )
        except OSError:
            pass  # the next `list` reads the records again


def place_in_list(row: ListRow) -> tuple[str, str, int]:
    """Return the sort key of a row: oldest first, elements of an array together and in order."""
    return (
        row.submitted_at,
        row.array_id or row.job_id,
        int(row.job_id.rpartition(SEPARATOR)[2]) if row.array_id else 0,
    )


def _stamps(records: Records) -> Iterator[tuple[str, Stamp]]:
    for entry in records.entries():
        try:
            found = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        yield entry.name.removesuffix(".json"), (found.st_ino, found.st_mtime_ns, found.st_size)
