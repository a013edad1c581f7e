"""Read the workers' output of all nodes as one stream in the order of time."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from clusterjob.node.logs.job_dir import AGENT_LOG, TIMELINE
from clusterjob.node.logs.log_files import (
    FILE_NAME,
    by_start,
    file_names,
    last_lines,
    last_state,
    node_directory,
    nodes,
    open_regular,
    shown,
)

LONGEST = 1 << 20  # maximum bytes of a line; a longer line is returned in parts
_PIECE = 1 << 16  # bytes to read at once
_MAX_OPEN = 4096  # maximum bytes to show of a line without a newline
_NOTE = re.compile(r"(\d+\.\d{3}) (\S+) (\d{1,18})", re.ASCII)


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
    late: bool = True  # whether `rest` was recorded late enough for the reader

    def lines_up_to(self, size: int | None, seconds: float = 0.0) -> Iterator[list[LogLine]]:
        """Yield the lines up to this file size, in batches that need little memory.

        Args:
            size: the size in bytes; None for the whole file.
            seconds: the time of the lines.
        """
        try:
            stream = open_regular(self.path, buffering=0)
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
                self.rest = rest if self.raw else _without_overwritten(rest)
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
            stream = open_regular(self.path, buffering=0)
        except OSError:
            return
        with stream:
            begin = os.fstat(stream.fileno()).st_size
            left = count + 1  # the last line may have a newline
            while begin > 0:
                end, begin = begin, max(0, begin - _PIECE)
                stream.seek(begin)
                newlines = list(re.finditer(b"\n", stream.read(end - begin)))
                if len(newlines) >= left:
                    begin += newlines[-left].end()
                    break
                left -= len(newlines)
            self.offset = begin

    def _lines(self, whole: bytes, seconds: float) -> list[LogLine]:
        """Return the lines of `whole`, which begins with `rest` and lacks the last newline."""
        # Decode all lines at once: decoding line by line takes much longer.
        texts = whole.decode(errors="surrogateescape" if self.raw else "replace").split("\n")
        if not self.raw and b"\r" in whole:
            texts = [last_state(text) for text in texts]
        node_rank, rank, stream = self.node_rank, self.rank, self.stream
        return [
            LogLine(node_rank, rank, stream=stream, text=text, seconds=seconds) for text in texts
        ]

    def _line(self, part: bytes, seconds: float, *, ended: bool = True) -> LogLine:
        text = part.decode(errors="surrogateescape") if self.raw else shown(part)
        return LogLine(
            self.node_rank, self.rank, stream=self.stream, text=text, seconds=seconds, ended=ended
        )


def _without_overwritten(part: bytes) -> bytes:
    """Return an incomplete line without the parts that a terminal would have overwritten.

    `shown` returns the same text for the shorter line, which needs less memory.
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
        rank: return only the lines of this worker, or of these workers.
        node: return only the lines of this node, or of these nodes.
        attempt: return only the lines of this attempt of the job.
        stream: return only the lines of this stream, ``out`` or ``err``.
        since: return only lines that were recorded at this time or later, in seconds since the
            epoch by the clock of the line's node.
        last: return only the lines of the last seconds before the newest record of their node.
        raw: return each line's bytes unchanged (decoded with ``surrogateescape``), including
            carriage returns.
    """

    def __init__(
        self,
        job_dir: Path,
        rank: int | Collection[int] | None = None,
        node: int | Collection[int] | None = None,
        attempt: int | None = None,
        *,
        stream: str | None = None,
        since: float | None = None,
        last: float | None = None,
        raw: bool = False,
    ) -> None:
        self._job_dir = job_dir
        self._ranks = (rank,) if isinstance(rank, int) else rank
        self._wanted_nodes = (node,) if isinstance(node, int) else node
        self._attempt = attempt
        self._stream = stream
        self._since = since
        self._last = last
        self._begins: dict[int, float] = {}
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
            if file is None:
                continue
            file.late = note.seconds >= self._begin(note.node_rank)
            lines = file.lines_up_to(note.size, note.seconds)
            yield from lines if file.late else ([] for _ in lines)
        if not end:
            return
        for node_rank in self._nodes():
            for file in self._files_of(node_rank):
                noted = file.offset
                yield from file.lines_up_to(None, self._moment)
                last_line = file.last_line(self._moment)
                yield last_line if file.late or file.offset > noted else []

    def attempts(self) -> set[int]:
        """Return the attempts of the job whose workers have log files."""
        return {
            int(match["attempt"] or 0)
            for node_rank in self._nodes()
            for name in file_names(node_directory(self._job_dir, node_rank))
            if (match := FILE_NAME.fullmatch(name)) is not None
        }

    def _begin(self, node_rank: int) -> float:
        """Return the earliest time of a node's lines, by the node's own clock."""
        if node_rank not in self._begins:
            begin = self._since or 0.0
            if self._last is not None:
                timeline = node_directory(self._job_dir, node_rank) / TIMELINE
                notes = [_NOTE.fullmatch(line) for line in last_lines(timeline)]
                newest = max((float(note[1]) for note in notes if note is not None), default=0.0)
                begin = max(begin, newest - self._last)
            self._begins[node_rank] = begin
        return self._begins[node_rank]

    def skip_to_tail(self, count: int) -> None:
        """Continue at the last `count` lines of each file, or shortly before them."""
        for node_rank in self._nodes():
            for file in self._files_of(node_rank):
                file.skip_to_tail(count)

    def positions(self) -> dict[str, int]:
        """Return how many bytes of each file were returned as lines; only for one node."""
        return {file.path.name: file.offset - len(file.rest) for file in self._files.values()}

    def continue_at(self, positions: Mapping[str, int]) -> None:
        """Continue where another reader of the same node has stopped: at its `positions`."""
        for node_rank in self._nodes():
            for name, offset in positions.items():
                file = self._file(node_rank, name)
                if file is not None:
                    file.offset = offset

    def open_lines(self) -> list[LogLine]:
        """Return lines without a newline, such as progress bars, of each worker's newest files."""
        newest: dict[tuple[int, int, str], _File] = {}
        for file in sorted(self._files.values(), key=lambda file: by_start(file.path.name)):
            newest[file.node_rank, -1 if file.rank is None else file.rank, file.stream] = file
        return [
            LogLine(
                file.node_rank,
                file.rank,
                stream=file.stream,
                text=shown(file.rest[-_MAX_OPEN:]),
                ended=False,
            )
            for _, file in sorted(newest.items(), key=lambda item: item[0])
            if file.rest.strip()
        ]

    def _notes(self, node_rank: int) -> Iterator[_Note]:
        """Yield the new records of a node's timeline; sort those of one time by `by_start`."""
        path = node_directory(self._job_dir, node_rank) / TIMELINE
        timeline = self._timelines.setdefault(
            node_rank, _File(node_rank, None, stream="out", path=path)
        )
        lines = (line for piece in timeline.lines_up_to(None) for line in piece)
        # A full disk may cut a line short.
        matches = (match for line in lines if (match := _NOTE.fullmatch(line.text)) is not None)
        notes = (
            _Note(float(match[1]), node_rank, order=by_start(match[2]), size=int(match[3]))
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
            directory = node_directory(self._job_dir, node_rank)
            if (directory / TIMELINE).exists() or (directory / AGENT_LOG).exists():
                continue
            for file in self._files_of(node_rank):
                with contextlib.suppress(OSError):
                    size = file.path.stat().st_size
                    if size > file.offset:
                        order = by_start(file.path.name)
                        found.append(_Note(time.time(), node_rank, order=order, size=size))
        return sorted(found)

    def _files_of(self, node_rank: int) -> Iterator[_File]:
        """Yield the files of a node that the reader returns, in the order of starts."""
        for name in file_names(node_directory(self._job_dir, node_rank)):
            file = self._file(node_rank, name)
            if file is not None:
                yield file

    def _nodes(self) -> list[int]:
        wanted = self._wanted_nodes
        return [node for node in nodes(self._job_dir) if wanted is None or node in wanted]

    def _file(self, node_rank: int, name: str) -> _File | None:
        match = FILE_NAME.fullmatch(name)
        if match is None:
            return None
        rank = int(match["rank"]) if match["rank"] else None
        attempt = int(match["attempt"] or 0)
        if (
            (self._ranks is not None and rank not in self._ranks)
            or self._attempt not in (None, attempt)
            or self._stream not in (None, match["stream"])
        ):
            return None
        path = node_directory(self._job_dir, node_rank) / name
        return self._files.setdefault(
            (node_rank, name),
            _File(node_rank, rank, stream=match["stream"], path=path, raw=self._raw),
        )
