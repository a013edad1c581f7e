"""Read Slurm's queue with at most one squeue per cluster in 5 s.

All processes of the user share one snapshot of the queue in a file. If the snapshot is too old, a
process runs squeue and writes a new snapshot.
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

from clusterjob.backends.slurm.client import UNREACHED, Client, SlurmOutput, Started
from clusterjob.errors import ClusterJobError
from clusterjob.node.system import files, private_dirs

COMMENT = "clusterjob:"  # prefix of the comment of a clusterjob job; the job id follows
INTERVAL = 5.0  # minimum seconds between two calls to one cluster
_SLOWEST = 30.0  # maximum seconds between two calls while the followed jobs do not change
_FIRST_TIMEOUT = 20.0  # maximum seconds for the first call; without a controller it takes 10-30 s
_COLUMNS = ("%F", "%K", "%A", "%T", "%r", "%S", "%V", "%j", "%Z", "%k")  # see `_row`
_EPOCH_TIMES = {"SLURM_TIME_FORMAT": "%s"}
_ACCOUNTING_FIELDS = (
    "JobID,State,Submit,ExitCode,NodeList,WorkDir"  # WorkDir last: only it may contain '|'
)

_MAX_TEXT = 4096  # maximum characters of a field: the length of the longest path
_MAX_NODES = 1000  # maximum characters of a list of nodes in a reason

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
class JobRow:
    """One job in Slurm's queue.

    Attributes:
        key: the job id; ``12_3`` for an element of an array.
        state: Slurm's state, such as RUNNING or TIMEOUT.
        reason: Slurm's reason for the wait, or for the state at the end.
        start: actual or expected start, local time; empty if Slurm shows no start.
        comment: the comment of the job. For a clusterjob job it starts with the job's own id.
            Plug-ins and `scontrol update` may change it.
        name: the job's name.
        directory: its working directory.
        submitted: time of submission or requeue, seconds since the epoch; 0 if not shown.
        failed_node: text naming the node that failed (NODE_FAIL); see `explained`.
        signal: number of the signal that ended the batch script; see `explained`.
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
        """The id that sbatch printed; for an array element, the id of its array."""
        return self.key.partition("_")[0]

    @property
    def active(self) -> bool:
        """Whether the job waits or runs."""
        return self.state in _ACTIVE

    @property
    def waiting(self) -> bool:
        """Whether the job waits for its nodes."""
        return self.state in _WAITING


@dataclass(frozen=True)
class QueueSnapshot:
    """The queue at one moment.

    Attributes:
        taken_at: start of the squeue call, seconds since the epoch; 0 if none has succeeded.
        rows: the user's jobs that Slurm remembers, by key.
        error: the error of the newest call; empty if it succeeded.
    """

    taken_at: float = 0.0
    rows: Mapping[str, JobRow] = field(default_factory=dict)
    error: str = ""

    @property
    def active(self) -> list[JobRow]:
        """The jobs that have not ended."""
        return [row for row in self.rows.values() if row.active]


class Queue:
    """The shared snapshot of one cluster's queue.

    Args:
        client: runs squeue.
        directory: the directory of the snapshot, private to the user.
    """

    def __init__(self, client: Client, directory: Path) -> None:
        self._client = client
        name = hashlib.sha256(client.key.encode()).hexdigest()[:16]
        self._path = directory / f"queue-{name}.json"
        self._lock_path = directory / f"queue-{name}.lock"
        self._looked = False
        # The running squeue, its start time and the separator of its fields.
        self._asking: tuple[Started, float, str] | None = None

    def poll(self, *, urgent: bool = False) -> QueueSnapshot:
        """Return the newest snapshot; only the first call of a process may wait for Slurm.

        Args:
            urgent: whether to keep the shortest interval between calls, because a job's directory
                has news that only Slurm can explain.
        """
        first, self._looked = not self._looked, True
        if first:
            self._await_another()
        stored = _read(self._path)
        age = time.time() - float(stored.get("asked_at", 0.0))
        quiet = int(stored.get("quiet", 0))
        if self._asking is not None:
            self._collect(timeout=0.0)
        elif (
            not 0.0 <= age < (INTERVAL if first or urgent else min(_SLOWEST, INTERVAL * 1.5**quiet))
        ):
            asking = self._ask(stored)
            if first and asking:
                self._collect(timeout=_FIRST_TIMEOUT)
        return _snapshot(_read(self._path))

    def close(self) -> None:
        """Kill a running squeue."""
        if self._asking is not None:
            process, _, _ = self._asking
            process.kill()
            process.communicate()
            self._asking = None

    def _await_another(self) -> None:
        """Wait until another process's squeue has ended, or INTERVAL seconds after its start."""
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
        """Start squeue unless another process has just started it; return whether it started."""
        private_dirs.make(self._path.parent)
        with self._locked() as mine:
            now = _read(self._path)
            if not mine or now.get("asked_at") != stored.get("asked_at"):
                return False
            begin = time.time()
            # Store the time before the call, and release the lock during the call: if this process
            # is stopped in between, it does not block the other processes.
            _keep(self._path, {**now, "asked_at": begin})
        mark = _new_mark()
        self._asking = (self._client.start(_squeue(mark), _EPOCH_TIMES), begin, mark)
        atexit.register(self.close)
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Hold the snapshot's lock for a write; yield False if another process has the lock."""
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

    def _collect(self, timeout: float) -> None:
        """Store squeue's answer if it arrives within timeout (seconds)."""
        assert self._asking is not None
        process, begin, mark = self._asking
        try:
            out, err = process.communicate(timeout=timeout or 0.001)
        except subprocess.TimeoutExpired:
            if timeout:
                self._note(
                    begin,
                    {"failed_at": begin, "error": f"it did not answer within {timeout:g} s"},
                )
            return
        self._asking = None
        atexit.unregister(self.close)
        answer = SlurmOutput(process.returncode, out, err=err)
        if answer.code == 0:
            self._note(begin, {"taken_at": begin, "rows": split(answer.out, mark), "error": ""})
        else:
            self._note(begin, {"failed_at": begin, "error": answer.words})

    def _note(self, begin: float, news: dict[str, Any]) -> None:
        with self._locked():
            now = _read(self._path)
            if begin < float(now.get("taken_at", 0.0)) <= time.time():
                return  # another process has stored a newer answer
            if "rows" in news:
                # Compare only active jobs: Slurm also removes ended jobs from the list.
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
        pass  # the disk is full: the next call runs squeue again


def _new_mark() -> str:
    """Return a random field separator for one squeue: no job name or comment can contain it."""
    return f"|{secrets.token_hex(8)}|"


def _squeue(mark: str) -> list[str]:
    """Return the command line that shows the user's jobs.

    Without --all, squeue leaves out jobs in hidden partitions, except for root.
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


def explained(client: Client, row: JobRow) -> JobRow:
    """Add the failed node and the script's signal to the row of an ended job.

    squeue does not show them.
    """
    if row.state not in ("NODE_FAIL", "FAILED"):
        return row
    shown = _shown(client, "scontrol", "--all", "--oneliner", "show", "job", row.key)
    values = {
        key: value[:_MAX_NODES]
        for key, value in re.findall(r"(?:^| )(FailedNode|NodeList|ExitCode)=(\S+)", shown)
        if value != "(null)"
    }
    if row.state == "FAILED":
        return replace(row, signal=_signal(values.get("ExitCode", "")))
    nodes = values.get("NodeList", "")
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
    # Slurm 22.05 has no FailedNode for a job that ended by NODE_FAIL.
    names = values.get("FailedNode") or ",".join(dict.fromkeys(down[:_MAX_NODES].split()))
    return replace(
        row, failed_node=f"node {names}" if names else f"one of {nodes}" if nodes else ""
    )


def _signal(exit_code: str) -> int:
    """Return the signal in Slurm's ``code:signal``; 0 if there is none."""
    number = exit_code.partition(":")[2]
    return int(number) if _is_number(number) else 0


def _shown(client: Client, *argv: str) -> str:
    try:
        return client.run(argv, timeout=INTERVAL).out
    except ClusterJobError:
        return ""


def split(text: str, mark: str) -> list[list[str]]:
    """Split the output of squeue into rows of fields."""
    fields, size = [field[:_MAX_TEXT] for field in text.split(mark)[:-1]], len(_COLUMNS)
    rows = [fields[begin : begin + size] for begin in range(0, len(fields) - size + 1, size)]
    return [[first.removeprefix("\n"), *others] for first, *others in rows]


def ask(client: Client) -> QueueSnapshot | None:
    """Run squeue now, without the shared snapshot; return None if it fails."""
    mark, begin = _new_mark(), time.time()
    answer = client.run(_squeue(mark), _EPOCH_TIMES)
    return (
        _snapshot({"taken_at": begin, "rows": split(answer.out, mark)})
        if answer.code == 0
        else None
    )


def _snapshot(stored: dict[str, Any]) -> QueueSnapshot:
    try:
        rows = [
            _row(*map(str, row)) for row in stored.get("rows", []) if _has_ids(*map(str, row[:3]))
        ]
        return QueueSnapshot(
            float(stored.get("taken_at", 0.0)),
            {row.key: row for row in rows},
            error=str(stored.get("error", "")),
        )
    except (TypeError, ValueError):
        return QueueSnapshot()


def _has_ids(base: str, task: str, own: str) -> bool:
    """Return whether the ids of a row are valid; later commands have them as arguments."""
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
) -> JobRow:
    key = f"{base}_{task}" if task != "N/A" else own
    reason = "" if reason == "None" else reason
    return JobRow(
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


def has_id(row: JobRow, job_id: str) -> bool:
    """Return whether a row's comment or working directory contains a job's own id.

    A site may change the comment or the working directory, but probably not both.
    """
    comment = f"{COMMENT}{job_id}"
    return (
        row.comment == comment
        or row.comment.startswith(f"{comment} ")
        or row.directory.endswith(f"/jobs/{job_id}")
    )


def rows_of(snapshot: QueueSnapshot, job_id: str) -> list[JobRow]:
    """Return the rows of a clusterjob job; see `has_id`."""
    return [row for row in snapshot.rows.values() if has_id(row, job_id)]


class Accounting:
    """Slurm's accounting, for jobs that squeue no longer shows; many sites do not have it.

    Args:
        client: runs sacct.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._absent = False
        self._asked_at = 0.0

    def ended(self, wanted: Mapping[str, tuple[float, str]]) -> dict[str, JobRow] | None:
        """Return the jobs that accounting shows, by key, with one sacct for all jobs.

        It runs sacct at most once in 5 s, and returns None if it is too early for the next call or
        if the login host is not reachable.

        Args:
            wanted: for each key, the submit time in seconds since the epoch, and the end of the
                path of the job's directory. No other job has the same end of the path, but Slurm
                may give the same id to another job.
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
                words, {"SLURM_TIME_FORMAT": "%s", "TZ": "UTC0"}, _FIRST_TIMEOUT
            )
        except ClusterJobError:
            answer = SlurmOutput(127, "", err="")
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
                    JobRow(key, word, failed_node=node, signal=_signal(exit_code)),
                )
        return found


def _bases(keys: Iterable[str]) -> Sequence[str]:
    return sorted({key.partition("_")[0] for key in keys})
