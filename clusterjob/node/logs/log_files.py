"""Name the files of the workers' output and read them as one stream.

Each worker writes directly to its own files. There is no pipe, so no line is lost if an agent dies,
and no worker waits for a reader. The agent records the size of each log file of its node ten times
a second in the file ``timeline``. With it, a reader can later show the lines of all ranks in the
order of time.

The files of node 0 in ``logs/node0/``:

- ``rank0.out``, ``rank0.err``, ``rank1.out``, ...: the first start.
- ``rank0.restart1.out``, ...: after a restart of the workers.
- ``rank0.attempt1.out``, ...: after the job was queued again.
- ``timeline``: one line ``<seconds> <file> <size>`` per change.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from clusterjob.node.logs.job_dir import AGENT_LOG, LOGS, TIMELINE

INTERVAL = 0.1  # seconds between two polls of the files
LONGEST = 1 << 20  # maximum bytes of a line; a longer line is returned in parts
_PIECE = 1 << 16  # bytes to read at once
_MAX_OPEN = 4096  # maximum bytes to show of a line without a newline
_NOTE = re.compile(r"(\d+\.\d{3}) (\S+) (\d{1,18})", re.ASCII)
_NAME = re.compile(
    r"(?:rank(?P<rank>\d{1,9})|torchrun)(?:\.attempt(?P<attempt>\d{1,9}))?"
    r"(?:\.restart(?P<restart>\d{1,9}))?\.(?P<stream>out|err)",
    re.ASCII,
)


def node_directory(job_dir: Path, node_rank: int) -> Path:
    """Return the log directory of one node."""
    return job_dir / LOGS / f"node{node_rank}"


def rank_files(directory: Path, rank: int, restart: int, attempt: int = 0) -> tuple[Path, Path]:
    """Return the stdout and stderr files of one worker."""
    return _files(directory, f"rank{rank}", restart=restart, attempt=attempt)


def torchrun_files(directory: Path, restart: int, attempt: int = 0) -> tuple[Path, Path]:
    """Return the stdout and stderr files of one node's torchrun, which merges workers' output."""
    return _files(directory, "torchrun", restart=restart, attempt=attempt)


def _files(directory: Path, stem: str, restart: int, attempt: int) -> tuple[Path, Path]:
    stem += f".attempt{attempt}" if attempt else ""
    stem += f".restart{restart}" if restart else ""
    return directory / f"{stem}.out", directory / f"{stem}.err"


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
            lines = [_shown(part).rstrip() for part in stream.read().split(b"\n")]
    except OSError:
        return ()
    return tuple(line for line in lines if line)[-count:]


def append(path: Path, lines: Sequence[str]) -> None:
    """Append lines with the prefix ``clusterjob:`` to a worker's file, in one write.

    An error such as a full disk loses the lines.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        return
    with contextlib.suppress(OSError):
        os.write(
            descriptor, "".join(f"clusterjob: {line}\n" for line in lines).encode(errors="replace")
        )
    os.close(descriptor)


def _shown(part: bytes) -> str:
    return _last_state(part.decode(errors="replace"))


def _last_state(text: str) -> str:
    """Return the final state of a line on a terminal: a progress bar rewrites its line."""
    return text.rstrip("\r").rpartition("\r")[2]


class Timeline:
    """Record the sizes of a node's log files over time; the agent writes it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sizes: dict[str, int] = {}

    def note(self) -> None:
        """Append the sizes of the files that have grown.

        An error such as a full disk loses the record: readers then read that part of the files at
        the end.
        """
        moment = f"{time.time():.3f}"
        grown = []
        try:
            for path in sorted(self._directory.iterdir()):
                size = path.stat().st_size if _NAME.fullmatch(path.name) else 0
                if size > self._sizes.get(path.name, 0):
                    self._sizes[path.name] = size
                    grown.append(f"{moment} {path.name} {size}\n")
            if grown:
                with (self._directory / TIMELINE).open("a") as stream:
                    stream.write("".join(grown))
        except OSError:
            pass


@dataclass(slots=True)  # not frozen: a large output has millions of them
class LogLine:
    """One line of output.

    Attributes:
        node_rank: the node that wrote it.
        rank: the worker's rank; None for a torchrun, which merges its workers' lines.
        stream: ``out`` or ``err``.
        text: the line without its newline; bytes that are not UTF-8 are replaced by U+FFFD.
        seconds: time since the epoch at which the timeline recorded it; 0 without a record.
        ended: whether it has a newline; False for the last line of a file without one, and for
            parts of a line longer than `LONGEST`.
    """

    node_rank: int
    rank: int | None
    stream: str
    text: str
    seconds: float = field(default=0.0, compare=False)
    ended: bool = field(default=True, compare=False)


@dataclass
class _File:
    """The reading state of one file; `rest` is the beginning of a line that has no newline yet."""

    node_rank: int
    rank: int | None
    stream: str
    path: Path
    raw: bool = False
    offset: int = 0
    rest: bytes = b""

    def lines_up_to(self, size: int | None, seconds: float = 0.0) -> Iterator[list[LogLine]]:
        """Yield the lines up to this file size, in batches that need little memory.

        Args:
            size: the size in bytes; None for the whole file.
            seconds: the time of the lines.
        """
        try:
            stream = _open_regular(self.path)
        except OSError:
            return
        with stream:
            end = os.fstat(stream.fileno()).st_size
            end = end if size is None else min(size, end)
            stream.seek(self.offset)
            while self.offset < end and (data := stream.read(min(_PIECE, end - self.offset))):
                self.offset += len(data)
                whole, found, rest = (self.rest + data).rpartition(b"\n")
                lines = self._lines(whole, seconds) if found else []
                self.rest = rest
                if not self.raw:
                    self.rest = _without_overwritten(self.rest)
                if len(self.rest) >= LONGEST:
                    lines.append(self._line(self.rest, seconds, ended=False))
                    self.rest = b""
                yield lines

    def last_line(self, seconds: float) -> list[LogLine]:
        rest, self.rest = self.rest, b""
        return [self._line(rest, seconds, ended=False)] if rest else []

    def skip_to_tail(self, count: int) -> None:
        """Continue at the last `count` lines, without reading the lines before them."""
        try:
            stream = _open_regular(self.path)
        except OSError:
            return
        with stream:
            begin, left = (
                os.fstat(stream.fileno()).st_size,
                count + 1,
            )  # the last line may have a newline
            while begin > 0 and left > 0:
                end, begin = begin, max(0, begin - _PIECE)
                stream.seek(begin)
                data = stream.read(end - begin)
                found = data.count(b"\n")
                if found < left:
                    left -= found
                    continue
                at = len(data)
                for _ in range(left):
                    at = data.rindex(b"\n", 0, at)
                begin += at + 1
                break
            self.offset = begin

    def _lines(self, whole: bytes, seconds: float) -> list[LogLine]:
        """Return complete lines from bytes that lack the last newline."""
        # Decode all lines at once: decoding line by line takes much longer.
        texts = whole.decode(errors="surrogateescape" if self.raw else "replace").split("\n")
        if not self.raw and b"\r" in whole:
            texts = [_last_state(text) for text in texts]
        node_rank, rank, stream = self.node_rank, self.rank, self.stream
        return [
            LogLine(node_rank, rank, stream=stream, text=text, seconds=seconds) for text in texts
        ]

    def _line(self, part: bytes, seconds: float, *, ended: bool = True) -> LogLine:
        text = part.decode(errors="surrogateescape") if self.raw else _shown(part)
        return LogLine(
            self.node_rank, self.rank, stream=self.stream, text=text, seconds=seconds, ended=ended
        )


def _open_regular(path: Path) -> BinaryIO:
    """Open a regular file; refuse a pipe or a device, which could block forever.

    The caller closes it.

    Raises:
        OSError: the path is not a regular file, or it cannot be opened.
    """
    stream = open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb", buffering=0)  # noqa: SIM115
    if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        return stream
    stream.close()
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def _without_overwritten(part: bytes) -> bytes:
    """Return an incomplete line without the parts that a terminal would have overwritten.

    `_shown` returns the same text for the shorter line, which needs less memory.
    """
    bare = part.rstrip(b"\r")
    return bare[bare.rfind(b"\r") + 1 :] + part[len(bare) :][:1]


class _Note(NamedTuple):
    """One line of a timeline: the size of a node's file at one time."""

    seconds: float
    node_rank: int
    order: tuple[int, int, int, str]
    size: int

    @property
    def name(self) -> str:
        return self.order[3]


class LogReader:
    """Read a job's logs as one stream in the order of time, also while they grow.

    Args:
        job_dir: the job's directory.
        rank: return only this worker's lines.
        node: return only this node's lines.
        attempt: return only the lines of this start of the job.
        raw: return each line's bytes unchanged (decoded with ``surrogateescape``), including
            carriage returns.
    """

    def __init__(
        self,
        job_dir: Path,
        rank: int | None = None,
        node: int | None = None,
        attempt: int | None = None,
        *,
        raw: bool = False,
    ) -> None:
        self._logs = job_dir / LOGS
        self._rank = rank
        self._node = node
        self._attempt = attempt
        self._raw = raw
        self._files: dict[tuple[int, str], _File] = {}
        self._timelines: dict[int, _File] = {}
        self._moment = 0.0

    def read(self) -> list[LogLine]:
        """Return the complete lines that the timelines recorded since the last call."""
        return [line for lines in self.batches(end=False) for line in lines]

    def finish(self) -> list[LogLine]:
        """Return all remaining lines, including those without a newline.

        Call it for a job that has ended, or to stop reading.
        """
        return [line for lines in self.batches(end=True) for line in lines]

    def batches(self, *, end: bool) -> Iterator[list[LogLine]]:
        """Yield the lines of `read`, or of `finish` if `end` is set, in small batches.

        A batch is empty if only a line without a newline has grown.
        """
        for note in heapq.merge(
            *(self._notes(node_rank) for node_rank in self._nodes()),
            self._unnoted(),
            key=lambda note: note.seconds,
        ):
            self._moment = max(self._moment, note.seconds)
            file = self._file(note.node_rank, note.name)
            if file is not None:
                yield from file.lines_up_to(note.size, note.seconds)
        if not end:
            return
        for node_rank in self._nodes():
            for name in _names(node_directory(self._logs.parent, node_rank)):
                file = self._file(node_rank, name)
                if file is not None:
                    yield from file.lines_up_to(None, self._moment)
                    yield file.last_line(self._moment)

    def skip_to_tail(self, count: int) -> None:
        """Continue at the last `count` lines of each file, or shortly before them."""
        for node_rank in self._nodes():
            for name in _names(node_directory(self._logs.parent, node_rank)):
                file = self._file(node_rank, name)
                if file is not None:
                    file.skip_to_tail(count)

    def open_lines(self) -> list[LogLine]:
        """Return lines without a newline, such as progress bars, of each worker's newest files."""
        newest: dict[tuple[int, int, str], tuple[tuple[int, int, int, str], _File]] = {}
        for (node_rank, name), file in self._files.items():
            key = (node_rank, -1 if file.rank is None else file.rank, file.stream)
            newest[key] = max(
                newest.get(key, (_by_start(name), file)),
                (_by_start(name), file),
                key=lambda pair: pair[0],
            )
        return [
            LogLine(
                file.node_rank,
                file.rank,
                stream=file.stream,
                text=_shown(file.rest[-_MAX_OPEN:]),
                ended=False,
            )
            for _, (_, file) in sorted(newest.items())
            if file.rest.strip()
        ]

    def _notes(self, node_rank: int) -> Iterator[_Note]:
        """Yield the new records of a node's timeline; sort those of one time by `_by_start`."""
        path = node_directory(self._logs.parent, node_rank) / TIMELINE
        timeline = self._timelines.setdefault(
            node_rank, _File(node_rank, None, stream="out", path=path)
        )
        lines = (line for piece in timeline.lines_up_to(None) for line in piece)
        # A full disk may cut a line short.
        matches = (match for line in lines if (match := _NOTE.fullmatch(line.text)) is not None)
        notes = (
            _Note(float(match[1]), node_rank, order=_by_start(match[2]), size=int(match[3]))
            for match in matches
        )
        for _, together in itertools.groupby(notes, key=lambda note: note.seconds):
            yield from sorted(together)

    def _unnoted(self) -> list[_Note]:
        """Return the current file sizes of nodes without an agent (``--launcher srun``).

        These nodes have no timeline.
        """
        found = []
        for node_rank in self._nodes():
            directory = node_directory(self._logs.parent, node_rank)
            if (directory / TIMELINE).exists() or (directory / AGENT_LOG).exists():
                continue
            for name in _names(directory):
                file = self._file(node_rank, name)
                size = _size(directory / name) if file is not None else 0
                if file is not None and size > file.offset:
                    found.append(_Note(time.time(), node_rank, order=_by_start(name), size=size))
        return sorted(found)

    def _nodes(self) -> list[int]:
        try:
            names = [
                path.name
                for path in self._logs.iterdir()
                if re.fullmatch(r"node\d{1,9}", path.name, re.ASCII)
            ]
        except OSError:
            return []
        return sorted(
            number for number in (int(name[4:]) for name in names) if self._node in (None, number)
        )

    def _file(self, node_rank: int, name: str) -> _File | None:
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        rank = int(match["rank"]) if match["rank"] else None
        if self._rank not in (None, rank) or self._attempt not in (
            None,
            int(match["attempt"] or 0),
        ):
            return None
        path = node_directory(self._logs.parent, node_rank) / name
        return self._files.setdefault(
            (node_rank, name),
            _File(node_rank, rank, stream=match["stream"], path=path, raw=self._raw),
        )


def _names(directory: Path) -> list[str]:
    """Return a directory's file names in the order of starts; empty if it was removed."""
    try:
        return sorted(os.listdir(directory), key=_by_start)
    except OSError:
        return []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _by_start(name: str) -> tuple[int, int, int, str]:
    """Return the sort key of a file: attempt, restart, rank, name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return 0, 0, -1, name
    return int(match["attempt"] or 0), int(match["restart"] or 0), int(match["rank"] or -1), name
