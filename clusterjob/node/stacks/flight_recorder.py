"""Ask torch's flight recorder of each worker for a dump: its last collectives.

torch 2.8 and newer records the collectives of NCCL. A thread of torch writes the record to a file
when something is written into a pipe; these variables name both. The dumps are in the logs. The
pipes are on this machine: the job directory may be on a disk that many nodes share.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from clusterjob.node.logs import log_files

PIPE_FILE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"  # torch appends the rank and ".pipe"
DUMP_FILE = "TORCH_FR_DUMP_TEMP_FILE"  # torch appends the rank
_POLL = 0.01
_MEMORY = "/dev/shm"  # noqa: S108 - mkdtemp makes a private directory


class FlightRecorder:
    """torch's flight recorders of a node's workers.

    The pipes are in a private directory of this machine. That of a killed agent stays, with the
    pipes, until this machine restarts.

    Args:
        job_dir: the job's directory.
        node_rank: the node.
        attempt: the job's attempt.
    """

    def __init__(self, job_dir: Path, node_rank: int, attempt: int) -> None:
        self._job_dir = job_dir
        self._directory = log_files.node_directory(job_dir, node_rank)
        self._attempt = attempt
        self._pipes: Path | None = None

    def variables(self, environ: Mapping[str, str], restart: int) -> dict[str, str]:
        """Return the workers' variables of a round.

        They are empty if the user has set them, or if no directory can be made for the pipes:
        torch's NCCL group would fail then.
        """
        if PIPE_FILE in environ or DUMP_FILE in environ:
            return {}
        if self._pipes is None:
            memory = _MEMORY if os.access(_MEMORY, os.W_OK) else None  # TMPDIR may be a shared disk
            try:
                self._pipes = Path(tempfile.mkdtemp(prefix="clusterjob-pipes-", dir=memory))
            except OSError:
                return {}
        return dict(zip((PIPE_FILE, DUMP_FILE), self._paths(restart), strict=True))

    def request(self, restart: int, ranks: Iterable[int], seconds: float) -> tuple[str, ...]:
        """Ask ranks for their dumps; return the paths of the files, relative to the job directory.

        Args:
            restart: the round.
            ranks: the ranks; one without a process group has no pipe.
            seconds: maximum time to wait for the files.
        """
        prefix, target = self._paths(restart)
        wanted = [Path(f"{target}{rank}") for rank in ranks if _write(f"{prefix}{rank}.pipe")]
        until = time.monotonic() + seconds
        while not all(path.exists() for path in wanted) and time.monotonic() < until:
            time.sleep(_POLL)
        # Without a wait, the files follow in some milliseconds.
        found = [path for path in wanted if path.exists() or not seconds]
        return tuple(str(path.relative_to(self._job_dir)) for path in found)

    def close(self) -> None:
        """Remove the pipes; the workers have ended."""
        if self._pipes is not None:
            shutil.rmtree(self._pipes, ignore_errors=True)
            self._pipes = None

    def _paths(self, restart: int) -> tuple[str, str]:
        """Return the paths of the pipes and of the dumps of a round, without the rank."""
        suffix = log_files.round_suffix(self._attempt, restart)
        return f"{self._pipes}/pipe{suffix}.rank", f"{self._directory}/flight_recorder{suffix}.rank"


def _write(pipe: str) -> bool:
    """Write into a pipe; return False if no process reads it."""
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.suppress(OSError), os.fdopen(os.open(pipe, flags), "wb", 0) as stream:
        return bool(stream.write(b"dump\n"))
    return False
