"""Poll jobs in background threads for a live screen, which takes the newest snapshot."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from clusterjob.backends.base import Status
from clusterjob.core import jobs, polling
from clusterjob.core.listing import row_of
from clusterjob.core.record_index import ListRow, RecordIndex, ended_row, place_in_list
from clusterjob.core.records import Record, Records
from clusterjob.errors import ClusterJobError
from clusterjob.insight import stragglers
from clusterjob.insight.live_node import NodeNow, NodeReader, RankNow
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import JobState, Verdict

INTERVAL = 2.0  # seconds between two polls
_SHARE = 5  # a poll that takes long is repeated after this many times its duration
_INDEX_INTERVAL = 10.0  # seconds between two readings of all records
_MAX_NODES = 4096
_RECENT = 10  # ended jobs that are shown below the others


@dataclass(frozen=True)
class JobNow:
    """The chosen job.

    Attributes:
        record: the job.
        status: its newest status; None before the first poll.
        nodes: its nodes.
    """

    record: Record
    status: Status | None
    nodes: tuple[NodeNow, ...]

    @property
    def ranks(self) -> list[RankNow]:
        """The ranks of all nodes."""
        return [rank for node in self.nodes for rank in node.ranks]

    @property
    def verdict(self) -> Verdict | None:
        """The verdict; None while the job runs."""
        if self.status is not None and self.status.verdict is not None:
            return self.status.verdict
        return self.record.verdict


@dataclass(frozen=True)
class Snapshot:
    """What a live screen shows.

    Attributes:
        jobs: a row per job; those that have not ended are first. None before they were read.
        chosen: the chosen job; None before it was read.
        error: the newest error of a poll, one line; empty if all succeeded.
    """

    jobs: tuple[ListRow, ...] | None = None
    chosen: JobNow | None = None
    error: str = ""


def _one_line(error: Exception) -> str:
    if isinstance(error, ClusterJobError):
        return sanitize(error.message)
    return sanitize(f"{type(error).__name__}: {error}")


class _Lane(threading.Thread):
    """Run the requests of one backend one after the other; the process does not wait for it."""

    def __init__(self, name: str) -> None:
        super().__init__(name=f"poll-{name}", daemon=True)
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.polling = False
        self.next_poll = 0.0
        self.start()

    def run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def add(self, task: Callable[[], None]) -> None:
        """Run a function after those that wait."""
        self._tasks.put(task)

    def close(self) -> None:
        """End the thread after its current request."""
        self._tasks.put(None)


@dataclass
class _Known:
    """What the polls have found; the lock of `JobPoller` protects it."""

    open: dict[str, Record] = field(default_factory=dict)
    rows: dict[str, ListRow] = field(default_factory=dict)
    statuses: dict[str, tuple[Record, Status]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


class JobPoller:
    """Poll jobs until `close`.

    Each backend is asked by a thread of its own, so that a host that does not answer delays only
    the jobs of its backend. Another thread reads the files of the chosen job.

    Args:
        wanted: the jobs to show; None for those that have not ended, and those that ended last.
        on_change: called by a background thread when `snapshot` has changed.
    """

    def __init__(self, wanted: Sequence[Record] | None, on_change: Callable[[], None]) -> None:
        self._wanted = None if wanted is None else [record.job_id for record in wanted]
        self._on_change = on_change
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._closing = threading.Event()
        self._known = _Known()
        self._lanes: dict[str, _Lane] = {}
        self._chosen = ""
        self._ended: Record | None = None  # the chosen job, if it has ended
        self._readers: list[NodeReader] = []
        self._readers_of = ""
        self._indexed = -_INDEX_INTERVAL
        self.snapshot = Snapshot()
        self._thread = threading.Thread(target=self._run, name="live", daemon=True)

    def start(self) -> None:
        """Start to poll."""
        self._thread.start()

    def close(self) -> None:
        """Stop to poll; requests that run are not waited for."""
        self._closing.set()
        self._woken.set()
        for lane in self._lanes.values():
            lane.close()

    def choose(self, job_id: str) -> None:
        """Choose the job whose nodes and ranks are read."""
        if job_id != self._chosen:
            self._chosen = job_id
            self._woken.set()

    def cancel(self, record: Record, done: Callable[[str], None]) -> None:
        """Cancel a job; `done` receives the error, or an empty text, in another thread."""

        def task() -> None:
            try:
                jobs.cancel([record])
                done("")
            except Exception as error:  # a plug-in may raise anything
                done(_one_line(error))
            self._woken.set()

        with self._lock:
            self._lane(record.backend).add(task)

    # -- the thread that reads files ---------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            self._woken.clear()
            begin = time.monotonic()
            try:
                self._refresh()
            except Exception as error:  # the screen stays, and shows it
                self.snapshot = replace(self.snapshot, error=_one_line(error))
            if self._closing.is_set():
                return
            self._on_change()
            took = time.monotonic() - begin
            self._woken.wait(max(INTERVAL, _SHARE * took) - took)

    def _refresh(self) -> None:
        if time.monotonic() - self._indexed >= _INDEX_INTERVAL:
            self._index()
            self._indexed = time.monotonic()
        self._start_polls()
        with self._lock:
            rows, errors = dict(self._known.rows), list(self._known.errors.values())
        if not self._chosen and rows:
            self._chosen = self._in_order(rows)[0].job_id
        self.snapshot = Snapshot(
            tuple(self._in_order(rows)), self._read_chosen(), error=next(iter(errors), "")
        )

    def _index(self) -> None:
        """Read the records: which jobs have not ended, and the rows of those that have."""
        records = Records()
        if self._wanted is None:
            index = RecordIndex(records)
            ended = sorted(index.rows, key=lambda row: row.ended_at, reverse=True)[:_RECENT]
            open_ = index.open
        else:
            found = [
                element
                for name in self._wanted
                if (record := records.read(name) or self._element(records, name)) is not None
                for element in records.elements(record)
            ]
            ended = [ended_row(each, each.verdict) for each in found if each.verdict is not None]
            open_ = [each for each in found if each.verdict is None or each.may_be_corrected]
        with self._lock:
            known = self._known
            known.open = {record.job_id: record for record in open_}
            rows = {row.job_id: row for row in ended}
            for record in open_:
                pair = known.statuses.get(record.job_id)
                if pair is not None:
                    rows[record.job_id] = row_of(*pair)
                else:
                    waiting = Status(JobState.UNKNOWN, "it has not been polled yet")
                    rows[record.job_id] = row_of(record, waiting)
            known.rows = rows
            known.statuses = {name: pair for name, pair in known.statuses.items() if name in rows}

    @staticmethod
    def _element(records: Records, name: str) -> Record | None:
        try:
            return records.find(name, any_format=True)
        except ClusterJobError:
            return None

    def _in_order(self, rows: dict[str, ListRow]) -> list[ListRow]:
        """Return the jobs that have not ended, the newest first, then the others."""
        if self._wanted is not None:
            return sorted(rows.values(), key=place_in_list)
        newest = sorted(rows.values(), key=place_in_list, reverse=True)
        open_ = [row for row in newest if not row.ended_at]
        return open_ + sorted(
            (row for row in newest if row.ended_at), key=lambda row: row.ended_at, reverse=True
        )

    def _read_chosen(self) -> JobNow | None:
        with self._lock:
            chosen = self._chosen
            pair = self._known.statuses.get(chosen)
            record = pair[0] if pair else self._known.open.get(chosen)
        if record is None and chosen:
            if self._ended is None or self._ended.job_id != chosen:
                self._ended = self._find_ended(chosen)
            record = self._ended
        if record is None:
            return None
        if self._readers_of != chosen:
            given = record.spec.get("hosts")
            hosts = [
                sanitize(str(host.get("name", ""))) if isinstance(host, dict) else ""
                for host in (given if isinstance(given, list) else ())
            ]
            self._readers_of = chosen
            self._readers = [
                NodeReader(record.job_dir, node, host=hosts[node] if node < len(hosts) else "")
                for node in range(min(record.nodes, _MAX_NODES))
            ]
        status = pair[1] if pair else None
        if status is not None and status.stragglers:
            status = replace(status, stragglers=stragglers.now(record.job_dir, status))
        over = record.verdict is not None or (status is not None and status.verdict is not None)
        return JobNow(record, status, tuple(each.read(ended=over) for each in self._readers))

    def _find_ended(self, job_id: str) -> Record | None:
        """Return the record of an ended job, and fetch the logs that are not here yet."""
        record = self._element(Records(), job_id)
        if record is not None:
            with self._lock:
                self._lane(record.backend).add(lambda: self._collect(record))
        return record

    def _collect(self, record: Record) -> None:
        # Its host may be gone: what is here is shown.
        with contextlib.suppress(Exception):
            polling.collect(record)

    # -- the threads that ask backends -------------------------------------------------------------

    def _lane(self, backend: str) -> _Lane:
        if backend not in self._lanes:
            self._lanes[backend] = _Lane(backend)
        return self._lanes[backend]

    def _start_polls(self) -> None:
        """Start a poll of each backend that has open jobs and none running."""
        with self._lock:
            groups: dict[str, list[Record]] = {}
            for record in self._known.open.values():
                groups.setdefault(record.backend, []).append(record)
            for backend, group in groups.items():
                lane = self._lane(backend)
                if not lane.polling and time.monotonic() >= lane.next_poll:
                    lane.polling = True
                    lane.add(lambda lane=lane, group=group: self._poll(lane, group))  # type: ignore[misc]

    def _poll(self, lane: _Lane, group: Sequence[Record]) -> None:
        begin, error = time.monotonic(), ""
        pairs: list[tuple[Record, Status]] = []
        try:
            pairs = polling.statuses(group)
            for record, _ in pairs:
                if record.job_id == self._chosen:
                    polling.collect(record)
        except Exception as problem:  # a plug-in may raise anything; the other jobs are shown
            error = _one_line(problem)
        with self._lock:
            known = self._known
            known.errors = {name: text for name, text in known.errors.items() if name != lane.name}
            if error:
                known.errors[lane.name] = error
            changed = False
            for record, status in pairs:
                old = known.rows.get(record.job_id)
                if old is None:
                    continue
                known.statuses[record.job_id] = (record, status)
                new = known.rows[record.job_id] = row_of(record, status)
                changed = changed or new.state != old.state
                if status.verdict is not None and not status.provisional:
                    known.open.pop(record.job_id, None)
            took = time.monotonic() - begin
            lane.next_poll = time.monotonic() + max(INTERVAL / 2, _SHARE * took)
            lane.polling = False
        if changed:
            self._woken.set()
