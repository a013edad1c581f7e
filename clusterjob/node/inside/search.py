"""Find a running worker of a job on this node: its environment and its working directory."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterjob.node import contract
from clusterjob.node.system import processes
from clusterjob.node.workers import worker_table

# Set for commands that `clusterjob exec` runs, which are no workers: the worker's pid.
MARK = "CLUSTERJOB_INSIDE"
# Variables that only the worker itself can use: descriptors that a command does not inherit.
_OWN = (contract.REPORT_FD, contract.WARNING_FD, contract.STDIN_FD)
_AT_SECURE = 23  # key of the auxiliary vector; getauxval(3)
_NODE_VARIABLES = ("CLUSTERJOB_NODE_RANK", "SLURM_NODEID")


class NotHereError(Exception):
    """This node has no such worker.

    Attributes:
        facts: ``why`` (absent, starting, old or rank); for a wrong rank also ``first``, ``count``
            and ``world`` of the ranks.
    """

    def __init__(self, why: str, **facts: int) -> None:
        super().__init__(why)
        self.facts = {"why": why, **facts}


@dataclass(frozen=True)
class WorkerPlace:
    """What a command shares with a worker.

    Attributes:
        rank: the worker's rank; None if it is not known.
        node: the node's rank.
        pid: the worker; it may have ended.
        environ: its environment.
        watched: pid and start time of the process with which the node's part of the job ends.
    """

    rank: int | None
    node: int
    pid: int
    watched: tuple[int, int]
    environ: dict[str, str] = field(repr=False)

    @property
    def directory(self) -> str:
        """The worker's working directory, or that of its forkserver."""
        for pid in (self.pid, self.watched[0]):
            with contextlib.suppress(OSError):
                return os.readlink(f"/proc/{pid}/cwd")
        return "/"

    def ended(self) -> bool:
        """Return whether the node's part of the job has ended."""
        pid, ticks = self.watched
        return processes.start_ticks(pid) != ticks


def find(job_id: str, node: int, rank: int | None) -> WorkerPlace:
    """Return the place of a worker on this node.

    Args:
        job_id: the job.
        node: the node's rank; several nodes of a job may be on one machine.
        rank: the worker's rank; None for the node's first worker.

    Raises:
        NotHereError: there is no such worker.
    """
    agents = False
    tables: list[tuple[int, int, dict[str, Any]]] = []
    tasks: list[tuple[int, dict[str, str]]] = []
    for pid, environ in _of_job(job_id):
        table = None
        with contextlib.suppress(OSError):
            table = worker_table.of_process(pid)
        if table is not None and table.get("node_rank") == node:
            tables.append((table["attempt"], pid, table))
        own = next((environ[name] for name in _NODE_VARIABLES if name in environ), None)
        if own == str(node):
            agents = True
            if "RANK" in environ:
                tasks.append((pid, environ))
    if tables:
        _, pid, table = max(tables, key=lambda each: each[:2])
        return _in_table(pid, table, node=node, rank=rank)
    if tasks:
        return _among_tasks(tasks, node=node, rank=rank)
    raise NotHereError("starting" if agents else "absent")


def _of_job(job_id: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the user's processes that were started for the job, with their environments."""
    wanted = f"{contract.JOB_ID}={job_id}".encode()
    user = os.geteuid()
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        try:
            if os.stat(f"/proc/{name}").st_uid != user:
                continue
            entries = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted not in entries or any(entry.startswith(MARK.encode()) for entry in entries):
            continue
        if not _is_set_user_id(int(name)):
            yield int(name), _parsed(entries)


def _is_set_user_id(pid: int) -> bool:
    """Return whether a process got its user from its program's set-user-ID bit.

    Another user may have chosen its environment and its open files.
    """
    try:
        data = Path(f"/proc/{pid}/auxv").read_bytes()
    except OSError:
        return False
    words = struct.unpack(f"{len(data) // struct.calcsize('L')}L", data)
    return bool(dict(zip(words[::2], words[1::2], strict=False)).get(_AT_SECURE))


def _parsed(entries: list[bytes]) -> dict[str, str]:
    pairs = (os.fsdecode(entry).partition("=") for entry in entries)
    return {name: value for name, equals, value in pairs if equals}


def _in_table(pid: int, table: dict[str, Any], node: int, rank: int | None) -> WorkerPlace:
    watched = (pid, processes.start_ticks(pid) or 0)
    workers = table["workers"]
    if workers and workers[0]["rank"] is None:  # torchrun starts the workers
        below = [
            (child, environ)
            for child in processes.descendants(workers[0]["pid"])
            if "RANK" in (environ := _environment_of(child)) and MARK not in environ
        ]
        if below:
            return _among_tasks(below, node=node, rank=rank, watched=watched)
    wanted = workers[0]["rank"] if rank is None else rank
    worker = next((each for each in workers if each["rank"] == wanted), None)
    if worker is None:
        raise NotHereError(
            "rank", first=table["first_rank"], count=table["nproc"], world=table["world_size"]
        )
    environ = {**table["environ"], **worker["variables"]}
    return WorkerPlace(
        wanted, node, worker["pid"], watched, environ=_cleaned(environ, worker["pid"])
    )


def _environment_of(pid: int) -> dict[str, str]:
    try:
        return _parsed(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return {}


def _among_tasks(
    tasks: list[tuple[int, dict[str, str]]],
    node: int,
    rank: int | None,
    watched: tuple[int, int] | None = None,
) -> WorkerPlace:
    """Return the place of a worker that has its rank in its own environment.

    A worker's child processes have the same variables: the topmost process is the worker.
    """
    pids = {pid for pid, _ in tasks}
    by_rank: dict[int, tuple[int, dict[str, str]]] = {}
    for pid, environ in tasks:
        fields = processes.stat_fields(pid)
        if fields is None or fields[0] in "ZX" or not environ["RANK"].isdecimal():
            continue
        number = int(environ["RANK"])
        if int(fields[1]) not in pids or number not in by_rank:
            by_rank[number] = (pid, environ)
    if not by_rank:
        raise NotHereError("starting")
    wanted = min(by_rank) if rank is None else rank
    if wanted not in by_rank:
        world = next(iter(by_rank.values()))[1].get("WORLD_SIZE", "")
        raise NotHereError(
            "rank",
            first=min(by_rank),
            count=len(by_rank),
            world=int(world) if world.isdecimal() else len(by_rank),
        )
    pid, environ = by_rank[wanted]
    return WorkerPlace(
        wanted,
        node,
        pid,
        watched or (pid, processes.start_ticks(pid) or 0),
        environ=_cleaned(environ, pid),
    )


def _cleaned(environ: dict[str, str], pid: int) -> dict[str, str]:
    kept = {name: value for name, value in environ.items() if name not in _OWN}
    return kept | {MARK: str(pid)}
