"""Tell the agent that this worker makes progress, for `--hang-timeout`.

The heartbeat is a line in the pipe of the agent that started this process. A process that torchrun
started has no such pipe: it touches a file of its node's logs. `Context` inherits from `Beating`.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from clusterjob.node import contract
from clusterjob.node.logs import job_dir, log_files
from clusterjob.node.workers import report
from clusterjob.worker import process

_INTERVAL = 1.0  # seconds between two heartbeats that are sent
_MAX_STEP = 2**62


class Beating:
    """The heartbeat of a `Context`."""

    local_rank: int
    node_rank: int
    _beat_at: float

    def heartbeat(self, step: int | None = None) -> None:
        """Tell clusterjob that this process makes progress; only `--hang-timeout` uses it.

        A training loop that prints nothing may call it in each step: it costs less than a
        microsecond, and once per second a small message. Under another launcher it does nothing.

        Args:
            step: the number of the training step, for the verdict of a job that hangs.
        """
        moment = time.monotonic()
        if moment < self._beat_at:
            return
        self._beat_at = moment + _INTERVAL
        descriptor = process.report_pipe()
        if descriptor is not None:
            number = -1 if step is None else min(max(int(step), 0), _MAX_STEP)
            report.report_alive(descriptor, self.local_rank, number)
        elif os.environ.get(contract.JOB_DIR):
            directory = log_files.node_directory(Path(os.environ[contract.JOB_DIR]), self.node_rank)
            with contextlib.suppress(OSError):
                (directory / job_dir.HEARTBEAT).touch(0o600)
