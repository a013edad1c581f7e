"""Show the environment of each worker to `clusterjob exec`.

A forked worker's /proc/PID/environ is that of the forkserver's exec. So the forkserver keeps the
environments in an anonymous file. Only the user's own processes can open it, through /proc/PID/fd,
and nothing is on a disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from clusterjob.node.contract import World

if TYPE_CHECKING:
    from clusterjob.node.workers.worker_process import RunningWorker, WorkerStart

NAME = "clusterjob-workers"  # in the link of the descriptor in /proc/PID/fd
MAX_BYTES = 64 << 20


class WorkerTable:
    """The forkserver's table of the workers of one round."""

    def __init__(self) -> None:
        self._file: int | None = None

    def clear(self) -> None:
        """Remove the table; called before workers are forked, which would inherit it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def write(
        self,
        world: World,
        attempt: int,
        starts: Iterable[WorkerStart],
        running: Iterable[RunningWorker],
    ) -> None:
        """Write the table; after an error, such as too many open files, there is none.

        Args:
            world: the round.
            attempt: the number of the job's attempt.
            starts: the variables of each worker; without RANK, torchrun starts the workers.
            running: the pid of each worker.
        """
        pids = {worker.local_rank: worker.pid for worker in running}
        workers = [
            {
                "rank": int(start.variables["RANK"]) if "RANK" in start.variables else None,
                "pid": pids[start.local_rank],
                "variables": start.variables,
            }
            for start in starts
        ]
        table = {
            "node_rank": world.node_rank,
            "attempt": attempt,
            "first_rank": world.first_rank,
            "nproc": world.nproc,
            "world_size": world.world_size,
            "environ": dict(os.environ),
            "workers": workers,
        }
        data = json.dumps(table).encode()
        with contextlib.suppress(OSError):
            self._file = _anonymous_file()
            view = memoryview(data)
            while view:
                view = view[os.write(self._file, view) :]


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):  # Python may be built without it
        return os.memfd_create(NAME)
    directory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108
    descriptor, path = tempfile.mkstemp(prefix=NAME, dir=directory)
    os.unlink(path)
    return descriptor


def of_process(pid: int) -> dict[str, Any] | None:
    """Return the table of a forkserver; None if the process has no table.

    Raises:
        OSError: the process has ended, or belongs to another user.
    """
    directory = f"/proc/{pid}/fd"
    for name in os.listdir(directory):
        with contextlib.suppress(FileNotFoundError):  # the process has closed it
            link = os.readlink(f"{directory}/{name}")
            if link.rpartition("/")[2].startswith((NAME, f"memfd:{NAME}")):
                with open(f"{directory}/{name}", "rb") as stream:
                    return _parse(stream.read(MAX_BYTES))
    return None


def _parse(data: bytes) -> dict[str, Any] | None:
    try:
        table = json.loads(data)
    except ValueError:  # it is being written
        return None
    return table if isinstance(table, dict) else None
