"""Show the environment of each worker to `clusterjob exec`.

A forked worker's /proc/PID/environ is that of the forkserver's exec. So the forkserver keeps the
environments in an anonymous file. Only the user's own processes can open it, through /proc/PID/fd,
and nothing is on a disk.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from clusterjob.node.contract import World
from clusterjob.node.job_processes import TABLE
from clusterjob.node.stacks.offer import anonymous_file

if TYPE_CHECKING:
    from clusterjob.node.workers.worker_process import RunningWorker, WorkerStart


class WorkerTable:
    """The forkserver's table of the workers of one round.

    Args:
        node_rank: the number of the node.
        attempt: the number of the job's attempt.
    """

    def __init__(self, node_rank: int, attempt: int) -> None:
        self._node_rank = node_rank
        self._attempt = attempt
        self._file: int | None = None

    def clear(self) -> None:
        """Remove the table; called before workers are forked, which would inherit it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def write(
        self,
        world: World,
        starts: Iterable[WorkerStart],
        running: Iterable[RunningWorker],
    ) -> None:
        """Write the table; after an error, such as too many open files, there is none.

        Args:
            world: the round.
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
            "node_rank": self._node_rank,
            "attempt": self._attempt,
            "first_rank": world.first_rank,
            "nproc": world.nproc,
            "world_size": world.world_size,
            "environ": dict(os.environ),
            "workers": workers,
        }
        data = json.dumps(table).encode()
        with contextlib.suppress(OSError):
            self._file = anonymous_file(TABLE)
            view = memoryview(data)
            while view:
                view = view[os.write(self._file, view) :]
