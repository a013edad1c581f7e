"""Slurm's queue as the user's jobs stand in it: one squeue for all jobs of a cluster, at most one in 5 s, whoever asks.

Every process of the user shares one snapshot in a file. Whoever finds it too old asks Slurm for all.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterjob.errors import ClusterJobError
from clusterjob.node import files
from clusterjob.slurm.client import UNREACHED, Answer, Client, Started

INTERVAL = 5.0  # seconds between two calls of one cluster, at least
_SLOWEST = 30.0  # ... where nothing changes while jobs are followed
_FIRST_PATIENCE = 20.0  # for the first look of a process; a controller that is down answers after 10 to 30
FIELDS = "%F|%K|%A|%T|%r|%S|%k"  # the comment last: it alone may hold a '|'
_ACCOUNTING_FIELDS = "JobID,State,Submit,WorkDir"  # the directory last: it alone may hold a '|'

_ACTIVE = frozenset({
    "PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING", "STOPPED",
    "SIGNALING", "STAGE_OUT", "SPECIAL_EXIT", "RESV_DEL_HOLD",
})  # fmt: skip
_WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"})


@dataclass(frozen=True)
class Row:
    """One job as Slurm has it.

    Attributes:
        key: its id; ``12_3`` for an element of an array.
        state: Slurm's word, such as RUNNING or TIMEOUT.
        reason: why it waits, or ended so.
        start: when it began or is expected to, as Slurm writes it; empty if Slurm does not say.
        comment: what was given with the job: ours begins with the job's own id.
    """

    key: str
    state: str
    reason: str = ""
    start: str = ""
    comment: str = ""

    @property
    def base(self) -> str:
        """The id that sbatch printed: for an element that of its array."""
        return self.key.partition("_")[0]

    @property
    def active(self) -> bool:
        """Whether it waits or runs."""
        return self.state in _ACTIVE

    @property
    def waiting(self) -> bool:
        """Whether it waits for its nodes."""
        return self.state in _WAITING


@dataclass(frozen=True)
class Snapshot:
    """The queue at one moment.

    Attributes:
        taken_at: when Slurm was asked, seconds since the epoch; 0 if it has never answered.
        rows: the user's jobs that Slurm remembers, by key.
        trouble: why the newest call failed; empty when it did not.
    """

    taken_at: float = 0.0
    rows: Mapping[str, Row] = field(default_factory=dict)
    trouble: str = ""


class Queue:
    """The shared snapshot of one cluster's queue.

    Args:
        client: runs squeue.
        directory: where the snapshot lies, in the user's own state.
    """

    def __init__(self, client: Client, directory: Path) -> None:
        self._client = client
        name = hashlib.sha256(client.key.encode()).hexdigest()[:16]
        self._path = directory / f"queue-{name}.json"
        self._lock_path = directory / f"queue-{name}.lock"
        self._looked = False
        self._asking: tuple[Started, float] | None = None  # the command, and when it began

    def look(self, *, urgent: bool = False) -> Snapshot:
        """Return the newest snapshot; the first look of a process may wait for Slurm, a later one never does.

        Args:
            urgent: there is news elsewhere that only Slurm can explain: the calls are not slowed down.
        """
        first, self._looked = not self._looked, True
        if first:
            self._await_another()
        stored = _read(self._path)
        age = time.time() - float(stored.get("asked_at", 0.0))
        quiet = int(stored.get("quiet", 0))
        if self._asking is not None:
            self._collect(patience=0.0)
        elif not 0.0 <= age < (INTERVAL if first or urgent else min(_SLOWEST, INTERVAL * 1.5**quiet)):
            asking = self._ask(stored)
            if first and asking:
                self._collect(patience=_FIRST_PATIENCE)
        return _snapshot(_read(self._path))

    def close(self) -> None:
        """Leave a question that is under way."""
        if self._asking is not None:
            process, _ = self._asking
            process.kill()
            process.communicate()
            self._asking = None

    def _await_another(self) -> None:
        """Let a process that has just asked get its answer, for as long as nobody else may ask anyway."""
        while True:
            stored = _read(self._path)
            asked_at = float(stored.get("asked_at", 0.0))
            answered = max(float(stored.get("taken_at", 0.0)), float(stored.get("failed_at", 0.0))) >= asked_at
            if answered or not 0.0 <= time.time() - asked_at < INTERVAL:
                return
            time.sleep(0.02)

    def _ask(self, stored: dict[str, Any]) -> bool:
        """Start squeue, unless somebody else has just asked; returns whether it was started."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked() as mine:
            now = _read(self._path)
            if not mine or now.get("asked_at") != stored.get("asked_at"):
                return False
            begin = time.time()
            # Noted before, and the lock given back: whoever is stopped while it asks keeps nobody else from asking after it.
            _keep(self._path, {**now, "asked_at": begin})
        argv = ["squeue", "--me", "--noheader", "--array", "--states=all", f"--format={FIELDS}"]
        self._asking = (self._client.start(argv), begin)
        atexit.register(self.close)
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Hold the lock on the snapshot, for the time that a file takes; False where somebody else does."""
        lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(lock)

    def _collect(self, patience: float) -> None:
        """Take squeue's answer in, if it comes within patience (seconds)."""
        assert self._asking is not None
        process, begin = self._asking
        try:
            out, err = process.communicate(timeout=patience or 0.001)
        except subprocess.TimeoutExpired:
            if patience:
                self._note(begin, {"failed_at": begin, "trouble": f"it did not answer within {patience:g} s"})
            return
        self._asking = None
        atexit.unregister(self.close)
        answer = Answer(process.returncode, out, err)
        if answer.code == 0:
            self._note(begin, {"taken_at": begin, "rows": _split(answer.out), "trouble": ""})
        else:
            self._note(begin, {"failed_at": begin, "trouble": answer.words})

    def _note(self, begin: float, news: dict[str, Any]) -> None:
        with self._locked():
            now = _read(self._path)
            if begin < float(now.get("taken_at", 0.0)) <= time.time():
                return  # somebody has a newer answer
            if "rows" in news:
                quiet = int(now.get("quiet", 0)) + 1 if news["rows"] == now.get("rows") else 0
                news["quiet"] = min(quiet, 9)
            _keep(self._path, {**now, "asked_at": max(begin, float(now.get("asked_at", 0.0))), **news})


def _read(path: Path) -> dict[str, Any]:
    stored = files.read_json(path)
    return stored if isinstance(stored, dict) else {}


def _keep(path: Path, value: dict[str, Any]) -> None:
    try:
        files.write_json(path, value)
    except OSError:
        pass  # a full disk: the next look asks again


def _split(text: str) -> list[list[str]]:
    """Return squeue's lines as fields; a line that a job's name or comment has broken is no row."""
    return [row for row in (line.split("|", 6) for line in text.split("\n")) if len(row) == 7]


def snapshot_of(text: str) -> Snapshot:
    """Return what squeue has just printed as a snapshot."""
    return _snapshot({"taken_at": time.time(), "rows": _split(text)})


def _snapshot(stored: dict[str, Any]) -> Snapshot:
    try:
        rows = [_row(*map(str, row)) for row in stored.get("rows", [])]
        return Snapshot(float(stored.get("taken_at", 0.0)), {row.key: row for row in rows}, str(stored.get("trouble", "")))
    except (TypeError, ValueError):
        return Snapshot()


def _row(base: str, task: str, own: str, state: str, reason: str, start: str, comment: str) -> Row:
    key = f"{base}_{task}" if task != "N/A" else own
    return Row(key, state, "" if reason == "None" else reason, "" if start == "N/A" else start, comment)


def by_comment(snapshot: Snapshot, comment: str) -> list[Row]:
    """Return the rows of the jobs that were submitted with this comment, or one that begins with it and a blank."""
    return [row for row in snapshot.rows.values() if row.comment == comment or row.comment.startswith(f"{comment} ")]


class Accounting:
    """Slurm's accounting, for jobs that squeue has forgotten; many sites have none.

    Args:
        client: runs sacct.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._absent = False
        self._asked_at = 0.0

    def ended(self, wanted: Mapping[str, tuple[float, str]]) -> dict[str, Row] | None:
        """Return the jobs that accounting knows, by key: one call for all, at most one in 5 s; None when it is too early to ask again.

        Args:
            wanted: for each key when it was submitted, seconds since the epoch, and the directory that it was submitted with, or the
                end of its path, which no other job has: another may have got the same id.
        """
        moment = time.monotonic()
        if self._absent or not wanted:
            return {}
        if self._asked_at and moment - self._asked_at < INTERVAL:
            return None
        self._asked_at = moment
        argv = ["sacct", "--allocations", "--noheader", "--parsable2", "--duplicates", f"--format={_ACCOUNTING_FIELDS}"]
        oldest = min(at for at, _ in wanted.values()) - 60
        since = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(oldest))
        try:
            words = [*argv, f"--starttime={since}", f"--jobs={','.join(_bases(wanted))}"]
            answer = self._client.run(words, {"SLURM_TIME_FORMAT": "%s", "TZ": "UTC0"}, _FIRST_PATIENCE)
        except ClusterJobError:
            answer = Answer(127, "", "")
        if answer.code == UNREACHED:
            return None
        if answer.code != 0:
            self._absent = True
            return {}
        found = {}
        newest: dict[str, int] = {}
        for line in answer.out.split("\n"):
            key, state, submitted, directory = [*line.split("|", 3), "", "", "", ""][:4]
            at = int(submitted) if submitted.isascii() and submitted.isdigit() else 0
            if key in wanted and directory.endswith(wanted[key][1]) and at >= newest.get(key, 0):  # a requeued job has several rows
                newest[key], found[key] = at, Row(key, state.partition(" ")[0].rstrip("+"))
        return found


def _bases(keys: Iterable[str]) -> Sequence[str]:
    return sorted({key.partition("_")[0] for key in keys})
