"""Where the workers' output lies, and how it is read as one stream.

Each worker writes straight into files of its own: no pipe, so no line is lost when an agent dies and no worker waits for a
reader. ``timeline`` notes, ten times a second, how far each file of the node had grown, which is what lets a reader on
another day show all ranks in the order of time. Lines that many ranks write alike fold into one: ``[0-15] loading``.

    logs/node0/rank0.out  rank0.err  rank1.out ...      first start
    logs/node0/rank0.restart1.out ...                   after a restart of the workers
    logs/node0/rank0.attempt1.out ...                   of the job that was queued again
    logs/node0/timeline                                 "<seconds> <file> <size>" a line
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

INTERVAL = 0.1  # seconds between two looks at the files
_NOTE = re.compile(r"(\d+\.\d{3}) (\S+) (\d{1,18})", re.ASCII)
_NAME = re.compile(r"(?:rank(?P<rank>\d+)|torchrun)(?:\.attempt(?P<attempt>\d+))?(?:\.restart(?P<restart>\d+))?\.(?P<stream>out|err)")


def node_directory(job_dir: Path, node_rank: int) -> Path:
    """Return the directory of one node's logs."""
    return job_dir / "logs" / f"node{node_rank}"


def rank_files(directory: Path, rank: int, restart: int, attempt: int = 0) -> tuple[Path, Path]:
    """Return one worker's files for stdout and stderr."""
    return _files(directory, f"rank{rank}", restart, attempt)


def torchrun_files(directory: Path, restart: int, attempt: int = 0) -> tuple[Path, Path]:
    """Return the files of one node's torchrun, which mixes its workers' output itself."""
    return _files(directory, "torchrun", restart, attempt)


def _files(directory: Path, stem: str, restart: int, attempt: int) -> tuple[Path, Path]:
    stem += f".attempt{attempt}" if attempt else ""
    stem += f".restart{restart}" if restart else ""
    return directory / f"{stem}.out", directory / f"{stem}.err"


def last_lines(path: Path, count: int = 20, limit: int = 8192) -> tuple[str, ...]:
    """Return the last lines of a file, at most `count` of them and from its last `limit` bytes; none if there is no file."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - limit))
            lines = [_shown(part).rstrip() for part in stream.read().split(b"\n")]
    except OSError:
        return ()
    return tuple(line for line in lines if line)[-count:]


def append(path: Path, lines: Sequence[str]) -> None:
    """Add lines to a worker's file, marked as ours, in one write among the worker's own. A full disk costs them."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        return
    with contextlib.suppress(OSError):
        os.write(descriptor, "".join(f"clusterjob: {line}\n" for line in lines).encode(errors="replace"))
    os.close(descriptor)


def _shown(part: bytes) -> str:
    """Return a line as a terminal would leave it: a progress bar rewrites its line, and its last state is left standing."""
    return part.decode(errors="replace").rstrip("\r").rpartition("\r")[2]


class Timeline:
    """The agent's side: notes how far each log file of its node has grown."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sizes: dict[str, int] = {}

    def note(self) -> None:
        """Look once and append what has grown. A full disk costs the note: readers then take the rest of the file last."""
        moment = f"{time.time():.3f}"
        grown = []
        try:
            for path in sorted(self._directory.iterdir()):
                size = path.stat().st_size if _NAME.fullmatch(path.name) else 0
                if size > self._sizes.get(path.name, 0):
                    self._sizes[path.name] = size
                    grown.append(f"{moment} {path.name} {size}\n")
            if grown:
                with (self._directory / "timeline").open("a") as stream:
                    stream.write("".join(grown))
        except OSError:
            pass


@dataclass(frozen=True)
class Line:
    """One line of output.

    Attributes:
        node_rank: the node that it comes from.
        rank: the worker's rank; None for a torchrun, which mixes its workers' lines.
        stream: ``out`` or ``err``.
        text: the line without its end; bytes that are no UTF-8 are shown as U+FFFD.
    """

    node_rank: int
    rank: int | None
    stream: str
    text: str


@dataclass
class _File:
    node_rank: int
    rank: int | None
    stream: str
    path: Path
    offset: int = 0
    rest: bytes = b""

    def lines_up_to(self, size: int | None) -> list[Line]:
        try:
            with self.path.open("rb") as stream:
                stream.seek(self.offset)
                data = stream.read(-1 if size is None else max(0, size - self.offset))
        except OSError:
            return []
        self.offset += len(data)
        *whole, self.rest = (self.rest + data).split(b"\n")
        return [self._line(part) for part in whole]

    def last_line(self) -> list[Line]:
        rest, self.rest = self.rest, b""
        return [self._line(rest)] if rest else []

    def _line(self, part: bytes) -> Line:
        return Line(self.node_rank, self.rank, self.stream, _shown(part))


class LogReader:
    """Reads a job's logs as one stream in the order of time, from the beginning and then as they grow.

    Args:
        job_dir: the job's directory.
        rank: only this worker's lines.
        node: only this node's lines.
        attempt: only the lines of this start of the job.
    """

    def __init__(self, job_dir: Path, rank: int | None = None, node: int | None = None, attempt: int | None = None) -> None:
        self._logs = job_dir / "logs"
        self._rank = rank
        self._node = node
        self._attempt = attempt
        self._files: dict[tuple[int, str], _File] = {}
        self._timelines: dict[int, _File] = {}

    def read(self) -> list[Line]:
        """Return the whole lines that were noted since the last call."""
        notes: list[tuple[float, int, str, int]] = []
        for node_rank in self._nodes():
            timeline = self._timelines.setdefault(
                node_rank, _File(node_rank, None, "out", node_directory(self._logs.parent, node_rank) / "timeline")
            )
            for line in timeline.lines_up_to(None):
                note = _NOTE.fullmatch(line.text)  # a line that a full disk cut short costs its place in time alone
                if note is not None:
                    notes.append((float(note[1]), node_rank, note[2], int(note[3])))
        notes += self._unnoted()
        found: list[Line] = []
        notes.sort(key=lambda note: (note[0], note[1], _by_start(note[2]), note[3]))
        for _, node_rank, name, noted in notes:
            file = self._file(node_rank, name)
            if file is not None:
                found += file.lines_up_to(noted)
        return found

    def finish(self) -> list[Line]:
        """Return all that is left, lines without an end included: for a job that is over, or of which this is enough."""
        found = self.read()
        for node_rank in self._nodes():
            for name in _names(node_directory(self._logs.parent, node_rank)):
                file = self._file(node_rank, name)
                if file is not None:
                    found += file.lines_up_to(None) + file.last_line()
        return found

    def _unnoted(self) -> list[tuple[float, int, str, int]]:
        """Return how far the files of nodes without an agent have grown: nobody else notes it there (``--launcher srun``)."""
        found = []
        for node_rank in self._nodes():
            directory = node_directory(self._logs.parent, node_rank)
            if (directory / "timeline").exists() or (directory / "agent.log").exists():
                continue
            for name in _names(directory):
                file = self._file(node_rank, name)
                size = _size(directory / name) if file is not None else 0
                if file is not None and size > file.offset:
                    found.append((time.time(), node_rank, name, size))
        return found

    def _nodes(self) -> list[int]:
        try:
            names = [path.name for path in self._logs.iterdir() if re.fullmatch(r"node\d+", path.name)]
        except OSError:
            return []
        return sorted(number for number in (int(name[4:]) for name in names) if self._node in (None, number))

    def _file(self, node_rank: int, name: str) -> _File | None:
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        rank = int(match["rank"]) if match["rank"] else None
        if self._rank not in (None, rank) or self._attempt not in (None, int(match["attempt"] or 0)):
            return None
        path = node_directory(self._logs.parent, node_rank) / name
        return self._files.setdefault((node_rank, name), _File(node_rank, rank, match["stream"], path))


def _names(directory: Path) -> list[str]:
    """Return what lies in a directory, as it was begun; nothing where it was taken away since it was seen."""
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
    """Order files as they were written: start by start, and in each by rank."""
    match = _NAME.fullmatch(name)
    if match is None:
        return 0, 0, -1, name
    return int(match["attempt"] or 0), int(match["restart"] or 0), int(match["rank"] or -1), name


@dataclass(frozen=True)
class Folded:
    """A line as it is shown: by whom, on which stream, what."""

    label: str
    stream: str
    text: str


class _Key(NamedTuple):
    node: int  # of a torchrun, which has no rank; else -1
    rank: int
    stream: str


def _key(line: Line) -> _Key:
    return _Key(line.node_rank, -1, line.stream) if line.rank is None else _Key(-1, line.rank, line.stream)


def fold(lines: list[Line]) -> list[Folded]:
    """Merge lines that several ranks wrote alike; each rank's own lines keep their order.

    The first line that was not shown yet is shown together with every other rank whose next line is the same.
    """
    queues: dict[_Key, deque[str]] = {}
    for line in lines:
        queues.setdefault(_key(line), deque()).append(line.text)
    heads: dict[tuple[str, str], list[_Key]] = {}
    for key, queue in queues.items():
        heads.setdefault((key.stream, queue[0]), []).append(key)
    shown: list[Folded] = []
    taken: Counter[_Key] = Counter()
    passed: Counter[_Key] = Counter()
    for line in lines:
        passed[_key(line)] += 1
        if passed[_key(line)] <= taken[_key(line)]:
            continue  # it went with an earlier line of another rank
        same = heads.pop((line.stream, line.text))
        for key in same:
            queues[key].popleft()
            taken[key] += 1
            if queues[key]:
                heads.setdefault((key.stream, queues[key][0]), []).append(key)
        shown.append(Folded(_label(same), line.stream, line.text))
    return shown


def _label(keys: list[_Key]) -> str:
    nodes = [f"node{key.node}" for key in sorted(keys) if key.rank < 0]
    return ",".join(nodes + ranges(sorted(key.rank for key in keys if key.rank >= 0)))


def ranges(numbers: list[int]) -> list[str]:
    """Return sorted numbers as ranges: [0, 1, 2, 5] becomes ["0-2", "5"]."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found]
