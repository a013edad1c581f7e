"""Run squeue and parse the rows that it prints."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clusterjob.backends.slurm.client import Client

COMMENT = "clusterjob:"  # prefix of the comment of a clusterjob job; the job id follows
_COLUMNS = ("%F", "%K", "%A", "%T", "%r", "%S", "%V", "%j", "%Z", "%k", "%M", "%N")  # see `_row`
EPOCH_TIMES = {"SLURM_TIME_FORMAT": "%s"}
_MAX_TEXT = 4096  # maximum characters of a field: the length of the longest path
_ACTIVE = frozenset({
    "PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD",
    "REQUEUE_FED", "RESIZING", "STOPPED", "SIGNALING", "STAGE_OUT", "SPECIAL_EXIT", "RESV_DEL_HOLD",
})  # fmt: skip
_WAITING = frozenset({
    "PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
})  # fmt: skip


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
        ran: seconds for which it has run since its last start; None if not shown.
        nodes: Slurm's list of its nodes; empty before its start.
        failed_node: text naming the node that failed (NODE_FAIL); see `accounting.explained`.
        signal: number of the signal that ended the batch script; see `accounting.explained`.
    """

    key: str
    state: str
    reason: str = ""
    start: str = ""
    comment: str = ""
    name: str = ""
    directory: str = ""
    submitted: float = 0.0
    ran: float | None = None
    nodes: str = ""
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

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> QueueSnapshot:
        """Return the snapshot from stored data; an empty snapshot if the data is not valid."""
        try:
            rows = [
                _row(*map(str, row))
                for row in stored.get("rows", [])
                if _has_ids(*map(str, row[:3]))
            ]
            return cls(
                float(stored.get("taken_at", 0.0)),
                {row.key: row for row in rows},
                error=str(stored.get("error", "")),
            )
        except (TypeError, ValueError):
            return cls()

    @property
    def active(self) -> list[JobRow]:
        """The jobs that have not ended."""
        return [row for row in self.rows.values() if row.active]


def new_mark() -> str:
    """Return a random field separator for one squeue: no job name or comment can contain it."""
    return f"|{secrets.token_hex(8)}|"


def command(mark: str) -> list[str]:
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


def split(text: str, mark: str) -> list[list[str]]:
    """Split the output of squeue into rows of fields."""
    fields, size = [field[:_MAX_TEXT] for field in text.split(mark)[:-1]], len(_COLUMNS)
    return [
        [fields[begin].removeprefix("\n"), *fields[begin + 1 : begin + size]]
        for begin in range(0, len(fields) - size + 1, size)
    ]


def ask(client: Client) -> QueueSnapshot | None:
    """Run squeue now, without the shared snapshot; return None if it fails."""
    mark, begin = new_mark(), time.time()
    answer = client.run(command(mark), EPOCH_TIMES)
    if answer.code != 0:
        return None
    return QueueSnapshot.from_json({"taken_at": begin, "rows": split(answer.out, mark)})


def _has_ids(base: str, task: str, own: str) -> bool:
    """Return whether the ids of a row are numbers: later commands get them as arguments."""
    return is_number(base) and is_number(own) and (task == "N/A" or is_number(task))


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
    ran: str,
    nodes: str,
) -> JobRow:
    if is_number(start):
        start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(int(start)))
    return JobRow(
        f"{base}_{task}" if task != "N/A" else own,
        state,
        reason="" if reason == "None" else reason,
        start="" if start == "N/A" else start,
        comment=comment,
        name=name,
        directory=directory,
        submitted=float(submitted) if is_number(submitted) else 0.0,
        ran=_seconds(ran),
        nodes=nodes,
    )


def _seconds(text: str) -> float | None:
    """Return the seconds of Slurm's D-HH:MM:SS or MM:SS; None for another text."""
    found = re.fullmatch(r"(?:(\d{1,6})-)?(?:(\d\d?):)?(\d\d?):(\d\d)", text, re.ASCII)
    if found is None:
        return None
    days, hours, minutes, seconds = map(float, found.groups("0"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def is_number(text: str) -> bool:
    """Return whether a text consists of at most 11 ASCII digits."""
    return text.isascii() and text.isdigit() and len(text) < 12


def has_id(row: JobRow, job_id: str) -> bool:
    """Return whether a row's name, comment or working directory contains a job's own id.

    A site may change one of them, but probably not all. Slurm may give the same number to another
    job (submitit#1660).
    """
    comment = f"{COMMENT}{job_id}"
    return (
        row.name == job_id
        or row.comment == comment
        or row.comment.startswith(f"{comment} ")
        or row.directory.endswith(f"/jobs/{job_id}")
    )


def rows_of(snapshot: QueueSnapshot, job_id: str) -> list[JobRow]:
    """Return the rows of a clusterjob job; see `has_id`."""
    return [row for row in snapshot.rows.values() if has_id(row, job_id)]
