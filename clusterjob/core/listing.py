"""One row per job for `list`. Rows of ended jobs come from a cache: to read 10,000 records takes
over a second.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from clusterjob.backends.base import Status
from clusterjob.core.records import SEPARATOR, Record, Records
from clusterjob.node.system import files

_CACHE = ".ended.json"  # beside the records; records' names have no dot in front
_SCHEMA = 1
Stamp = tuple[
    int, int, int
]  # inode, time of the last change (ns of the epoch), size (bytes): other ones once a file is replaced
_MANY = 50  # new rows that are worth writing the cache again


class Row(NamedTuple):
    """What `list` shows of a job, or of one element of an array."""

    job_id: str
    state: str
    exit_code: str  # empty before the end
    nodes: str
    cluster: str
    submitted_at: str
    reason: str

    @property
    def array_id(self) -> str:
        """The array that this is an element of; empty for a job of its own."""
        return self.job_id.rpartition(SEPARATOR)[0] if SEPARATOR in self.job_id else ""


def row_of(record: Record, status: Status) -> Row:
    """Return the row of a job in this state."""
    code = "" if status.verdict is None else str(status.verdict.exit_code)
    reason = status.reason.partition("\n")[0]
    return Row(
        record.job_id,
        str(status.state),
        exit_code=code,
        nodes=str(record.nodes),
        cluster=record.cluster,
        submitted_at=record.submitted_at,
        reason=reason,
    )


class Listing:
    """All jobs, parted: the rows of those that have ended, and the records of the others.

    Attributes:
        rows: jobs whose end is on record; an array's elements each have one.
        open: jobs whose end is not, or is a guess that may be corrected; of an array, such
            elements.
        broken: names of files among the records that are none, or cannot be read.
    """

    def __init__(self, records: Records) -> None:
        self.rows: list[Row] = []
        self.open: list[Record] = []
        self.broken: list[str] = []
        self._records = records
        self._stamps = dict(_stamps(records))
        self._cache_path = records.directory / _CACHE
        self._cached = self._load()
        self._known: dict[str, tuple[Stamp, Row]] = {}
        news = sum(self._take(name) for name in self._stamps)
        if news > _MANY or len(self._cached) > len(self._known) + _MANY:
            self._save()

    def with_states(self, states: Iterable[tuple[Record, Status]]) -> list[Row]:
        """Return a row for each job, the oldest first, an array's elements together.

        Args:
            states: how the open ones stand.
        """
        return sorted(
            [*self.rows, *(row_of(record, status) for record, status in states)], key=place_in_list
        )

    def _take(self, name: str) -> bool:
        """Sort in what the file of this name holds; return whether its row is new to the cache."""
        if self._take_cached(name):
            return False
        if SEPARATOR in name:
            return False  # an element's: taken with its array
        record = self._records.read(name)
        if record is None:
            self.broken.append(f"{name}.json")
            return False
        return sum(self._part(element) for element in self._elements(record)) > 0

    def _take_cached(self, name: str) -> bool:
        stamp, row = self._cached.get(name, (None, None))
        if stamp is None or row is None or stamp != self._stamps[name]:
            return False
        self._known[name] = (stamp, row)
        self.rows.append(row)
        return True

    def _elements(self, record: Record) -> Iterator[Record]:
        """Yield the elements of an array that are not in the cache; any other job itself."""
        if record.array is None:
            yield record
            return
        for index in record.array["indices"]:
            name = f"{record.job_id}{SEPARATOR}{index}"
            if name not in self._stamps:
                yield record.element(index)
            elif (
                name not in self._known and self._cached.get(name, (None,))[0] != self._stamps[name]
            ):
                yield self._records.read(name) or record.element(index)

    def _part(self, record: Record) -> bool:
        """Sort in a job that is not in the cache; return whether its row may be cached."""
        verdict = record.verdict
        if verdict is None or record.may_be_corrected:
            self.open.append(record)
            return False
        row = row_of(record, Status(verdict.state, verdict.reason, verdict=verdict))
        self.rows.append(row)
        if record.job_id in self._stamps:
            self._known[record.job_id] = (self._stamps[record.job_id], row)
        return True

    def _load(self) -> dict[str, tuple[Stamp, Row]]:
        data = files.read_json(self._cache_path)
        try:
            if isinstance(data, dict) and data["schema"] == _SCHEMA:
                return {
                    name: ((inode, modified, size), Row(name, *row))
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
            pass  # the next one reads the records again


def place_in_list(row: Row) -> tuple[str, str, int]:
    """Return what rows are sorted by: the oldest first, an array's elements together and in their
    order.
    """
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
