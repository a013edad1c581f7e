"""Find a running worker of a job on this node: its environment and its working directory."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field

from clusterjob.node import contract, job_processes
from clusterjob.node.system import processes

# Variables that only the worker itself can use: descriptors that a command does not inherit.
_OWN = (contract.REPORT_FD, contract.WARNING_FD, contract.STDIN_FD)


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
    found = job_processes.on_node(job_id, node)
    if not found.ranks:
        raise NotHereError("starting" if found.started else "absent")
    wanted = found.ranks[0].rank if rank is None else rank
    process = next((each for each in found.ranks if each.rank == wanted), None)
    if process is None:
        raise NotHereError("rank", first=found.first, count=found.count, world=found.world)
    watched = process.pid if found.forkserver is None else found.forkserver
    return WorkerPlace(
        wanted,
        node,
        process.pid,
        (watched, processes.start_ticks(watched) or 0),
        environ=_cleaned(process.environ, process.pid),
    )


def _cleaned(environ: dict[str, str], pid: int) -> dict[str, str]:
    kept = {name: value for name, value in environ.items() if name not in _OWN}
    return kept | {job_processes.MARK: str(pid)}
