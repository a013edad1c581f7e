"""Slurm's queue as the user's jobs stand in it: one squeue for all jobs of a cluster, at most one
in 5 s, whoever asks.

Every process of the user shares one snapshot in a file. Whoever finds it too old asks Slurm for
all.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clusterjob.backends.slurm.client import UNREACHED, Answer, Client, Started
from clusterjob.errors import ClusterJobError
from clusterjob.node.system import files, private_dirs

COMMENT = "clusterjob:"  # begins the comment of each of our jobs, before the job's own id
INTERVAL = 5.0  # seconds between two calls of one cluster, at least
_SLOWEST = 30.0  # ... where nothing changes while jobs are followed
_FIRST_PATIENCE = (
    20.0  # for the first look of a process; a controller that is down answers after 10 to 30
)
_COLUMNS = ("%F", "%K", "%A", "%T", "%r", "%S", "%V", "%j", "%Z", "%k")  # see `_row`
_EPOCH_TIMES = {"SLURM_TIME_FORMAT": "%s"}
_ACCOUNTING_FIELDS = (
    "JobID,State,Submit,ExitCode,NodeList,WorkDir"  # the directory last: it alone may hold a '|'
)

_MOST_TEXT = 4096  # characters of a field: the longest path
_MOST_NODES = 1000  # characters of a list of nodes in a reason

_ACTIVE = frozenset({
    "PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD",
    "REQUEUE_FED", "RESIZING", "STOPPED", "SIGNALING", "STAGE_OUT", "SPECIAL_EXIT", "RESV_DEL_HOLD",
})  # fmt: skip
_WAITING = frozenset(
    {
        "PENDING",
        "CONFIGURING",
        "REQUEUED",
        "REQUEUE_HOLD",
        "REQUEUE_FED",
        "SPECIAL_EXIT",
        "RESV_DEL_HOLD",
    }
)


@dataclass(frozen=True)
class Row:
    """One job as Slurm has it.

    Attributes:
        key: its id; ``12_3`` for an element of an array.
        state: Slurm's word, such as RUNNING or TIMEOUT.
        reason: why it waits, or ended so.
        start: when it began or is expected to, local time; empty if Slurm does not say.
        comment: what was given with the job: ours begins with the job's own id. Plug-ins and
            `scontrol update` may change it.
        name: the job's name.
        directory: its working directory.
        submitted: when Slurm took it, or queued it again, seconds since the epoch; 0 if Slurm does
            not say.
        failed_node: which node ended it by NODE_FAIL, in words; see `explained`.
        signal: the number of the signal that ended the batch script; likewise.
    """

    key: str
    state: str
    reason: str = ""
    start: str = ""
    comment: str = ""
    name: str = ""
    directory: str = ""
    submitted: float = 0.0
    failed_node: str = ""
    signal: int = 0

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

    @property
    def active(self) -> list[Row]:
        """The jobs that have not ended."""
        return [row for row in self.rows.values() if row.active]


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
        self._asking: tuple[Started, float, str] | None = (
            None  # the command, when it began, and the mark between its fields
        )

    def look(self, *, urgent: bool = False) -> Snapshot:
        """Return the newest snapshot; the first look of a process may wait for Slurm, a later one
        never does.

        Args:
            urgent: there is news elsewhere that only Slurm can explain: the calls are not slowed
                down.
        """
        first, self._looked = not self._looked, True
        if first:
            self._await_another()
        stored = _read(self._path)
        age = time.time() - float(stored.get("asked_at", 0.0))
        quiet = int(stored.get("quiet", 0))
        if self._asking is not None:
            self._collect(patience=0.0)
        elif (
            not 0.0 <= age < (INTERVAL if first or urgent else min(_SLOWEST, INTERVAL * 1.5**quiet))
        ):
            asking = self._ask(stored)
            if first and asking:
                self._collect(patience=_FIRST_PATIENCE)
        return _snapshot(_read(self._path))

    def close(self) -> None:
        """Leave a question that is under way."""
        if self._asking is not None:
            process, _, _ = self._asking
            process.kill()
            process.communicate()
            self._asking = None

    def _await_another(self) -> None:
        """Let a process that has just asked get its answer, for as long as nobody else may ask
        anyway.
        """
        while True:
            stored = _read(self._path)
            asked_at = float(stored.get("asked_at", 0.0))
            answered = (
                max(float(stored.get("taken_at", 0.0)), float(stored.get("failed_at", 0.0)))
                >= asked_at
            )
            if answered or not 0.0 <= time.time() - asked_at < INTERVAL:
                return
            time.sleep(0.02)

    def _ask(self, stored: dict[str, Any]) -> bool:
        """Start squeue, unless somebody else has just asked; returns whether it was started."""
        private_dirs.make(self._path.parent)
        with self._locked() as mine:
            now = _read(self._path)
            if not mine or now.get("asked_at") != stored.get("asked_at"):
                return False
            begin = time.time()
            # Noted before, and the lock given back: whoever is stopped while it asks keeps nobody
            # else from asking after it.
            _keep(self._path, {**now, "asked_at": begin})
        mark = _new_mark()
        self._asking = (self._client.start(_squeue(mark), _EPOCH_TIMES), begin, mark)
        atexit.register(self.close)
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Hold the lock on the snapshot, for the time that a file takes; False where somebody else
        does.
        """
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
        process, begin, mark = self._asking
        try:
            out, err = process.communicate(timeout=patience or 0.001)
        except subprocess.TimeoutExpired:
            if patience:
                self._note(
                    begin,
                    {"failed_at": begin, "trouble": f"it did not answer within {patience:g} s"},
                )
            return
        self._asking = None
        atexit.unregister(self.close)
        answer = Answer(process.returncode, out, err=err)
        if answer.code == 0:
            self._note(begin, {"taken_at": begin, "rows": split(answer.out, mark), "trouble": ""})
        else:
            self._note(begin, {"failed_at": begin, "trouble": answer.words})

    def _note(self, begin: float, news: dict[str, Any]) -> None:
        with self._locked():
            now = _read(self._path)
            if begin < float(now.get("taken_at", 0.0)) <= time.time():
                return  # somebody has a newer answer
            if "rows" in news:
                # That Slurm forgets an ended job is no news.
                same = "rows" in now and _snapshot(news).active == _snapshot(now).active
                quiet = int(now.get("quiet", 0)) + 1 if same else 0
                news["quiet"] = min(quiet, 9)
            _keep(
                self._path, {**now, "asked_at": max(begin, float(now.get("asked_at", 0.0))), **news}
            )


def _read(path: Path) -> dict[str, Any]:
    stored = files.read_json(path)
    return stored if isinstance(stored, dict) else {}


def _keep(path: Path, value: dict[str, Any]) -> None:
    try:
        files.write_json(path, value)
    except OSError:
        pass  # a full disk: the next look asks again


def _new_mark() -> str:
    """Return what parts the fields of one squeue: a name or a comment that holds a '|' or a line
    break cannot know it.
    """
    return f"|{secrets.token_hex(8)}|"


def _squeue(mark: str) -> list[str]:
    """Return the command line that shows the user's jobs. --all: without it those in hidden
    partitions are missing, for all but root.
    """
    return [
        "squeue",
        "--me",
        "--all",
        "--noheader",
        "--array",
        "--states=all",
        f"--format={mark.join((*_COLUMNS, ''))}",
    ]


def explained(client: Client, row: Row) -> Row:
    """Return the row of an ended job with what squeue does not say: the node that failed, the
    signal that ended the batch script.
    """
    if row.state not in ("NODE_FAIL", "FAILED"):
        return row
    shown = _shown(client, "scontrol", "--all", "--oneliner", "show", "job", row.key)
    said = {
        key: value[:_MOST_NODES]
        for key, value in re.findall(r"(?:^| )(FailedNode|NodeList|ExitCode)=(\S+)", shown)
        if value != "(null)"
    }
    if row.state == "FAILED":
        return replace(row, signal=_signal(said.get("ExitCode", "")))
    nodes = said.get("NodeList", "")
    down = (
        _shown(
            client,
            "sinfo",
            "--all",
            "--noheader",
            "--Node",
            f"--nodes={nodes}",
            "--states=down,fail",
            "--format=%N",
        )
        if nodes
        else ""
    )
    names = said.get("FailedNode") or ",".join(
        dict.fromkeys(down[:_MOST_NODES].split())
    )  # 22.05 has no FailedNode of a job that ended so
    return replace(
        row, failed_node=f"node {names}" if names else f"one of {nodes}" if nodes else ""
    )


def _signal(exit_code: str) -> int:
    """Return the signal in Slurm's ``code:signal``; 0 where there is none."""
    number = exit_code.partition(":")[2]
    return int(number) if _is_number(number) else 0


def _shown(client: Client, *argv: str) -> str:
    try:
        return client.run(argv, patience=INTERVAL).out
    except ClusterJobError:
        return ""


def split(text: str, mark: str) -> list[list[str]]:
    """Return what squeue printed as rows of fields."""
    fields, size = [field[:_MOST_TEXT] for field in text.split(mark)[:-1]], len(_COLUMNS)
    rows = [fields[begin : begin + size] for begin in range(0, len(fields) - size + 1, size)]
    return [[first.removeprefix("\n"), *others] for first, *others in rows]


def ask(client: Client) -> Snapshot | None:
    """Return the queue as Slurm has it now, for one question outside of the shared snapshot; None
    where there is no answer.
    """
    mark, begin = _new_mark(), time.time()
    answer = client.run(_squeue(mark), _EPOCH_TIMES)
    return (
        _snapshot({"taken_at": begin, "rows": split(answer.out, mark)})
        if answer.code == 0
        else None
    )


def _snapshot(stored: dict[str, Any]) -> Snapshot:
    try:
        rows = [
            _row(*map(str, row)) for row in stored.get("rows", []) if _has_ids(*map(str, row[:3]))
        ]
        return Snapshot(
            float(stored.get("taken_at", 0.0)),
            {row.key: row for row in rows},
            trouble=str(stored.get("trouble", "")),
        )
    except (TypeError, ValueError):
        return Snapshot()


def _has_ids(base: str, task: str, own: str) -> bool:
    """Return whether a row names a job as Slurm does: its ids stand on command lines later."""
    return _is_number(base) and _is_number(own) and (task == "N/A" or _is_number(task))


def _row(
    base: str,
    task: str,
    own: str,
    state: str,
    reason: str,
    start: str,
    submitted: str,
    name: str,
    directory: str,
    comment: str,
) -> Row:
    key = f"{base}_{task}" if task != "N/A" else own
    reason = "" if reason == "None" else reason
    return Row(
        key,
        state,
        reason=reason,
        start=_local_time(start),
        comment=comment,
        name=name,
        directory=directory,
        submitted=float(submitted) if _is_number(submitted) else 0.0,
    )


def _local_time(text: str) -> str:
    return (
        time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(int(text)))
        if _is_number(text)
        else ""
        if text == "N/A"
        else text
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 12


def bears_id(row: Row, job_id: str) -> bool:
    """Return whether a row's comment or working directory names one of our jobs. A site may change
    either, hardly both.
    """
    comment = f"{COMMENT}{job_id}"
    return (
        row.comment == comment
        or row.comment.startswith(f"{comment} ")
        or row.directory.endswith(f"/jobs/{job_id}")
    )


def rows_of(snapshot: Snapshot, job_id: str) -> list[Row]:
    """Return the rows of one of our jobs; see `bears_id`."""
    return [row for row in snapshot.rows.values() if bears_id(row, job_id)]


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
        """Return the jobs that accounting knows, by key: one call for all, at most one in 5 s; None
        when it is too early to ask again.

        Args:
            wanted: for each key when it was submitted, seconds since the epoch, and the directory
                that it was submitted with, or the end of its path, which no other job has: another
                may have got the same id.
        """
        moment = time.monotonic()
        if self._absent or not wanted:
            return {}
        if self._asked_at and moment - self._asked_at < INTERVAL:
            return None
        self._asked_at = moment
        argv = [
            "sacct",
            "--allocations",
            "--noheader",
            "--parsable2",
            "--duplicates",
            f"--format={_ACCOUNTING_FIELDS}",
        ]
        oldest = min(at for at, _ in wanted.values()) - 60
        since = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(oldest))
        try:
            words = [*argv, f"--starttime={since}", f"--jobs={','.join(_bases(wanted))}"]
            answer = self._client.run(
                words, {"SLURM_TIME_FORMAT": "%s", "TZ": "UTC0"}, _FIRST_PATIENCE
            )
        except ClusterJobError:
            answer = Answer(127, "", err="")
        if answer.code == UNREACHED:
            return None
        if answer.code != 0:
            self._absent = True
            return {}
        found = {}
        newest: dict[str, int] = {}
        for line in answer.out.split("\n"):
            key, state, submitted, exit_code, nodes, directory = [
                *line.split("|", 5),
                "",
                "",
                "",
                "",
                "",
                "",
            ][:6]
            at = int(submitted) if _is_number(submitted) else 0
            if (
                key in wanted and directory.endswith(wanted[key][1]) and at >= newest.get(key, 0)
            ):  # a requeued job has several rows
                word = state.partition(" ")[0].rstrip("+")
                node = (
                    f"one of {nodes}"
                    if word == "NODE_FAIL" and nodes not in ("", "None assigned")
                    else ""
                )
                newest[key], found[key] = (
                    at,
                    Row(key, word, failed_node=node, signal=_signal(exit_code)),
                )
        return found


def _bases(keys: Iterable[str]) -> Sequence[str]:
    return sorted({key.partition("_")[0] for key in keys})
