"""Find the processes of a job on this machine, and which of them are its ranks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterjob.node import contract
from clusterjob.node.system import processes

# Set for commands that `clusterjob exec` runs, which are no workers: the worker's pid.
MARK = "CLUSTERJOB_INSIDE"
# The forkserver's table of its workers: part of the link of the descriptor in /proc/PID/fd.
TABLE = "clusterjob-workers"
_MAX_TABLE = 64 << 20  # bytes
_KEYS = {"node_rank", "attempt", "environ", "workers"}
_AT_SECURE = 23  # key of the auxiliary vector; getauxval(3)
_RANK = re.compile(r"\d{1,9}", re.ASCII)
_NODE_VARIABLES = ("CLUSTERJOB_NODE_RANK", "SLURM_NODEID")


@dataclass(frozen=True)
class RankProcess:
    """The process of one rank.

    Attributes:
        rank: its rank.
        pid: the process; it may have ended.
        environ: its environment.
    """

    rank: int
    pid: int
    environ: dict[str, str] = field(repr=False)


@dataclass(frozen=True)
class NodeProcesses:
    """The processes of one node of a job.

    Attributes:
        ranks: the node's ranks, in order; empty if no workers run.
        forkserver: the pid of the forkserver; None if Slurm has started the ranks.
        started: whether any process of the node was found.
    """

    ranks: tuple[RankProcess, ...] = ()
    forkserver: int | None = None
    started: bool = False


def on_node(job_id: str, node: int) -> NodeProcesses:
    """Return the processes of a job's node.

    Args:
        job_id: the job.
        node: the node's rank; several nodes of a job may be on one machine.
    """
    tables: list[tuple[int, int, dict[str, Any]]] = []
    own: list[tuple[int, dict[str, str]]] = []
    for pid, environ in _of_job(job_id):
        table = table_of(pid)
        if table is not None and table["node_rank"] == node:
            tables.append((table["attempt"], pid, table))
        if next((environ[name] for name in _NODE_VARIABLES if name in environ), "") == str(node):
            own.append((pid, environ))
    if len(tables) > 1:  # a worker may offer a false table
        below = {child for _, pid, _ in tables for child in processes.descendants(pid)}
        tables = [each for each in tables if each[1] not in below]
    if tables:
        _, pid, table = max(tables, key=lambda each: each[:2])
        return _in_table(pid, table)
    tasks = [each for each in own if "RANK" in each[1]]
    return _among_tasks(tasks) if tasks else NodeProcesses(started=bool(own))


def of_forkserver(pid: int) -> NodeProcesses:
    """Return the processes of a forkserver's node; without ranks if it has ended."""
    table = table_of(pid)
    return NodeProcesses() if table is None else _in_table(pid, table)


def _of_job(job_id: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the user's processes that were started for the job, with their environments."""
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        environ = processes.environment_of(pid)
        wanted = environ.get(contract.JOB_ID) == job_id and MARK not in environ
        if wanted and pid != os.getpid() and _is_own(pid):
            yield pid, environ


def _is_own(pid: int) -> bool:
    """Return whether a process is the user's, and not by its program's set-user-ID bit.

    Another user may have chosen the environment and the open files of such a program.
    """
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
        data = Path(f"/proc/{pid}/auxv").read_bytes()
    except OSError:
        return False
    words = struct.unpack(f"{len(data) // struct.calcsize('L')}L", data)
    secure = dict(zip(words[::2], words[1::2], strict=False)).get(_AT_SECURE)
    return owner == os.geteuid() and not secure


def table_of(pid: int) -> dict[str, Any] | None:
    """Return the table of a forkserver; None if it has ended, or the process has no table."""
    # The process has ended, or belongs to another user; or the table is being written, or is not
    # the forkserver's.
    with contextlib.suppress(OSError, ValueError, RecursionError):
        for path in processes.files_named(pid, TABLE):
            with open(path, "rb") as stream:
                table = json.loads(stream.read(_MAX_TABLE))
            return table if isinstance(table, dict) and table.keys() >= _KEYS else None
    return None


def _in_table(pid: int, table: dict[str, Any]) -> NodeProcesses:
    return NodeProcesses(
        tuple(
            RankProcess(
                worker["rank"], worker["pid"], environ={**table["environ"], **worker["variables"]}
            )
            for worker in table["workers"]
        ),
        forkserver=pid,
        started=True,
    )


def _among_tasks(tasks: list[tuple[int, dict[str, str]]]) -> NodeProcesses:
    """Return the ranks among processes that have their rank in their own environment.

    A worker's child processes have the same variables: the topmost process is the worker.
    """
    pids = {pid for pid, _ in tasks}
    by_rank: dict[int, RankProcess] = {}
    for pid, environ in tasks:
        fields = processes.stat_fields(pid)
        if fields is None or fields[0] in "ZX" or not _RANK.fullmatch(environ["RANK"]):
            continue
        number = int(environ["RANK"])
        if int(fields[1]) not in pids or number not in by_rank:
            by_rank[number] = RankProcess(number, pid, environ=environ)
    ranks = tuple(by_rank[number] for number in sorted(by_rank))
    return NodeProcesses(ranks, started=True)
