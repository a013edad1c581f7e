"""Name the files of the workers' output and record how they grow.

`workers.output_drain` writes the workers' output into these files. The agent records the size of
each log file of its node ten times a second in the file ``timeline``. With it, a reader can later
show the lines of all ranks in the order of time.

The files of node 0 in ``logs/node0/``:

- ``rank0.out``, ``rank0.err``, ``rank1.out``, ...: the first start.
- ``rank0.restart1.out``, ...: after a restart of the workers.
- ``rank0.attempt1.out``, ...: after the job was queued again.
- ``timeline``: one line ``<seconds> <file> <size>`` per change.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from clusterjob.node.logs.job_dir import LOGS, TIMELINE
from clusterjob.node.system.files import Appender, size_of

if TYPE_CHECKING:
    from clusterjob.node.contract import World

INTERVAL = 0.1  # seconds between two polls of the files
_NODE = re.compile(r"node(\d{1,9})", re.ASCII)
FILE_NAME = re.compile(
    r"(?:rank(?P<rank>\d{1,9})|torchrun)(?:\.attempt(?P<attempt>\d{1,9}))?"
    r"(?:\.restart(?P<restart>\d{1,9}))?\.(?P<stream>out|err)",
    re.ASCII,
)


def node_directory(job_dir: Path, node_rank: int) -> Path:
    """Return the log directory of one node."""
    return job_dir / LOGS / f"node{node_rank}"


def nodes(job_dir: Path) -> list[int]:
    """Return the ranks of the nodes that have a log directory in a job's directory."""
    try:
        matches = map(_NODE.fullmatch, os.listdir(job_dir / LOGS))
    except OSError:
        return []
    return sorted(int(match[1]) for match in matches if match)


def rank_files(directory: Path, rank: int, restart: int, attempt: int = 0) -> tuple[Path, Path]:
    """Return the stdout and stderr files of one worker."""
    return _files(directory, f"rank{rank}", restart=restart, attempt=attempt)


def torchrun_files(directory: Path, restart: int, attempt: int = 0) -> tuple[Path, Path]:
    """Return the stdout and stderr files of one node's torchrun, which merges workers' output."""
    return _files(directory, "torchrun", restart=restart, attempt=attempt)


def round_files(
    directory: Path, world: World, attempt: int, *, torchrun: bool
) -> list[tuple[Path, Path]]:
    """Return the files of one round's workers by local rank, or those of the node's torchrun."""
    if torchrun:
        return [torchrun_files(directory, world.restart, attempt=attempt)]
    ranks = range(world.first_rank, world.first_rank + world.nproc)
    return [rank_files(directory, rank, restart=world.restart, attempt=attempt) for rank in ranks]


def _files(directory: Path, stem: str, restart: int, attempt: int) -> tuple[Path, Path]:
    stem += round_suffix(attempt, restart)
    return directory / f"{stem}.out", directory / f"{stem}.err"


def round_suffix(attempt: int, restart: int) -> str:
    """Return the part of a file name that names a round, such as ``.attempt1.restart2``."""
    return (f".attempt{attempt}" if attempt else "") + (f".restart{restart}" if restart else "")


def file_names(directory: Path) -> list[str]:
    """Return a directory's file names in the order of starts; empty if it was removed."""
    try:
        return sorted(os.listdir(directory), key=by_start)
    except OSError:
        return []


def by_start(name: str) -> tuple[int, int, int, str]:
    """Return the sort key of a file: attempt, restart, rank, name."""
    match = FILE_NAME.fullmatch(name)
    if match is None:
        return 0, 0, -1, name
    return int(match["attempt"] or 0), int(match["restart"] or 0), int(match["rank"] or -1), name


def last_lines(path: Path, count: int = 20, limit: int = 8192) -> tuple[str, ...]:
    """Return the last lines of a file; empty if it cannot be read.

    Args:
        path: the file.
        count: the maximum number of lines.
        limit: the maximum number of bytes to read from the end.
    """
    try:
        with path.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - limit))
            lines = [shown(part).rstrip() for part in stream.read().split(b"\n")]
    except OSError:
        return ()
    return tuple(line for line in lines if line)[-count:]


def open_regular(path: Path, *, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading; refuse a pipe or a device, which could block forever.

    The caller closes it.

    Args:
        path: the file.
        buffering: as in `open`; 0 for an unbuffered file.

    Raises:
        OSError: the path is not a regular file, or it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb", buffering=buffering)
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def append(path: Path, lines: Sequence[str]) -> None:
    """Append lines with the prefix ``clusterjob:`` to a worker's file, in one write.

    Raises:
        OSError: the disk is full, for example.
    """
    text = "".join(f"clusterjob: {line}\n" for line in lines)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    with open(descriptor, "wb", buffering=0) as stream:
        stream.write(text.encode(errors="replace"))


def shown(part: bytes) -> str:
    """Return the text of a line as a terminal shows it."""
    return last_state(part.decode(errors="replace"))


def last_state(text: str) -> str:
    """Return the final state of a line on a terminal: a progress bar rewrites its line."""
    return text.rstrip("\r").rpartition("\r")[2]


class Timeline:
    """Record the sizes of a node's log files over time; the agent writes it.

    The directory is listed once: on a shared disk, each listing costs a round trip.

    Attributes:
        grown_at: the monotonic time at which a file was last seen to have grown, or to be new.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = Appender(directory / TIMELINE)
        self._sizes: dict[str, int] = {}  # by name
        self._listed = False
        self.grown_at = time.monotonic()

    def follow(self, files: Iterable[Path]) -> None:
        """Record the sizes of those files that are log files of workers, once they exist."""
        for path in files:
            if FILE_NAME.fullmatch(path.name) and path.name not in self._sizes:
                self.grown_at = time.monotonic()
                self._sizes[path.name] = 0

    def note(self) -> list[str]:
        """Append the sizes of the files that have grown; return their names.

        An error such as a full disk loses the record: readers then read that part of the files at
        the end.
        """
        moment = f"{time.time():.3f}"
        grown: dict[str, str] = {}
        if not self._listed:
            self._listed = True
            self.follow(self._directory / name for name in file_names(self._directory))
        for name, old in sorted(self._sizes.items()):
            size = size_of(self._directory / name)
            if size > old:
                self._sizes[name] = size
                grown[name] = f"{moment} {name} {size}\n"
        if grown:
            self.grown_at = time.monotonic()
            with contextlib.suppress(OSError):
                self._file.write("".join(grown.values()).encode())
        return list(grown)
