"""Ask torch's flight recorder of each worker for a dump: its last collectives.

torch records the collectives of a process. With NCCL, a thread of torch writes the record to a file
when something is written into a pipe; these variables name both. With gloo, torch has no such
thread: `torch_patches` adds it. The dumps are in the logs. The pipes are on this machine: the job
directory may be on a disk that many nodes share.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from clusterjob.node.logs import events, log_files

PIPE_FILE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"  # torch appends the rank and ".pipe"
DUMP_FILE = "TORCH_FR_DUMP_TEMP_FILE"  # torch appends the rank
# Before torch 2.8, the file had another name, and torch recorded nothing by default. Newer versions
# warn about these names.
_FIRST_WITH_NEW_NAMES = (2, 8)
OLD_DUMP_FILE, OLD_SIZE = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
_ENTRIES = "2000"  # as newer versions
_POLL = 0.01
_MEMORY = "/dev/shm"  # noqa: S108 - mkdtemp makes a private directory


class Pipes:
    """A private directory of this machine for the pipes of a node's workers.

    That of a killed agent stays, with the pipes, until this machine restarts.

    Raises:
        OSError: no pipe can be made there; torch's NCCL group would fail.
    """

    def __init__(self) -> None:
        memory = _MEMORY if os.access(_MEMORY, os.W_OK) else None  # TMPDIR may be a shared disk
        self.path = Path(tempfile.mkdtemp(prefix="clusterjob-pipes-", dir=memory))
        try:
            os.mkfifo(self.path / "try", 0o600)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.path, ignore_errors=True)


class Dumps:
    """The dumps of one round of a node's workers.

    Args:
        job_dir: the job's directory.
        pipes: the directory of the pipes; None without pipes.
        node_rank: the node.
        attempt, restart: the round.
    """

    def __init__(
        self, job_dir: Path, pipes: Path | None, node_rank: int, attempt: int, restart: int
    ) -> None:
        self._job_dir = job_dir
        self._pipes = pipes
        suffix = log_files.round_suffix(attempt, restart)
        self._pipe = f"{pipes}/node{node_rank}{suffix}.rank"
        directory = log_files.node_directory(job_dir, node_rank)
        self._dump = str(directory / f"flight_recorder{suffix}.rank")

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the workers' variables; empty if the user has set them, or without pipes."""
        own = any(name in environ for name in (PIPE_FILE, DUMP_FILE, OLD_DUMP_FILE))
        if own or self._pipes is None:
            return {}
        if _has_new_names():
            return {PIPE_FILE: self._pipe, DUMP_FILE: self._dump}
        size = environ.get(OLD_SIZE, _ENTRIES)
        return {PIPE_FILE: self._pipe, OLD_DUMP_FILE: self._dump, OLD_SIZE: size}

    def request(self, ranks: Iterable[int], seconds: float) -> tuple[str, ...]:
        """Ask ranks for their dumps; return the paths of the files, relative to the job directory.

        Args:
            ranks: the ranks; one without a process group has no pipe.
            seconds: maximum time to wait for the files.
        """
        wanted = []
        for rank in ranks:
            for pipe, dump in (("pipe", ""), ("json.pipe", ".json")):
                if _write(f"{self._pipe}{rank}.{pipe}"):
                    wanted.append(Path(f"{self._dump}{rank}{dump}"))
        until = time.monotonic() + seconds
        while not all(path.exists() for path in wanted) and time.monotonic() < until:
            time.sleep(_POLL)
        # Without a wait, the files follow in some milliseconds.
        found = [path for path in wanted if path.exists() or not seconds]
        return tuple(str(path.relative_to(self._job_dir)) for path in found)


def _has_new_names() -> bool:
    version = events.versions().get("torch", "")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return not numbers or numbers >= _FIRST_WITH_NEW_NAMES


def _write(pipe: str) -> bool:
    """Write into a pipe; return False if no process reads it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return os.write(descriptor, b"dump\n") > 0
        finally:
            os.close(descriptor)
    return False
