"""Name the files of the workers' output, record how they grow, read them, fold equal lines.

`workers.output_drain` writes the workers' output into these files. The agent records the size of
each log file of its node ten times a second in the file ``timeline``. With it, a reader can later
show the lines of all ranks and nodes in the order of time: see `LogReader`. `fold` makes one line
of equal lines of several ranks: ``[0-15] loading``.

The files of node 0 in ``logs/node0/``:

- ``rank0.out``, ``rank0.err``, ``rank1.out``, ...: the first start.
- ``rank0.restart1.out``, ...: after a restart of the workers.
- ``rank0.attempt1.out``, ...: after the job was queued again.
- ``timeline``: one line ``<seconds> <file> <size>`` per change.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import heapq
import itertools
import operator
import os
import re
import stat
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from clusterjob.node.logs.job_dir import AGENT_LOG, LOGS, TIMELINE
from clusterjob.node.system.files import Appender, listed, size_of
from clusterjob.node.system.ranges import ranges

if TYPE_CHECKING:
    from clusterjob.node.contract import World

INTERVAL = 0.1  # seconds between two polls of the files
LONGEST = 1 << 20  # maximum bytes of a line; a longer line is returned in parts
WINDOW = 2.0  # seconds within which equal lines of several ranks are folded
_PIECE = 1 << 16  # bytes to read at once
_MAX_OPEN = 4096  # maximum bytes to show of a line without a newline
_MAX_HELD, _MAX_HELD_BYTES = 5_000, 4 << 20  # maximum lines and bytes to hold back
_MAX_AHEAD = 32  # maximum lines of one rank to look at for an equal line
_Note = tuple[float, int, str, int]  # a line of a timeline: seconds, node, name and size of a file
NOTE = re.compile(r"(\d{1,12}\.\d{3}) (\S{1,80}) (\d{1,18})", re.ASCII)  # a line of a timeline
_NODE = re.compile(r"node(\d{1,9})", re.ASCII)
FILE_NAME = re.compile(
    r"rank(?P<rank>\d{1,9})(?:\.attempt(?P<attempt>\d{1,9}))?"
    r"(?:\.restart(?P<restart>\d{1,9}))?\.(?P<stream>out|err)",
    re.ASCII,
)


def node_directory(job_dir: Path, node_rank: int) -> Path:
    """Return the log directory of one node."""
    return job_dir / LOGS / f"node{node_rank}"


def nodes(job_dir: Path) -> list[int]:
    """Return the ranks of the nodes that have a log directory in a job's directory."""
    matches = map(_NODE.fullmatch, file_names(job_dir / LOGS))
    return sorted(int(match[1]) for match in matches if match)


def rank_files(directory: Path, rank: int, restart: int, attempt: int = 0) -> tuple[Path, Path]:
    """Return the stdout and stderr files of one worker."""
    stem = f"rank{rank}{round_suffix(attempt, restart)}"
    return directory / f"{stem}.out", directory / f"{stem}.err"


def round_files(directory: Path, world: World, attempt: int) -> list[tuple[Path, Path]]:
    """Return the files of one round's workers by local rank."""
    ranks = range(world.first_rank, world.first_rank + world.nproc)
    return [rank_files(directory, rank, world.restart, attempt) for rank in ranks]


def round_suffix(attempt: int, restart: int) -> str:
    """Return the part of a file name that names a round, such as ``.attempt1.restart2``."""
    return (f".attempt{attempt}" if attempt else "") + (f".restart{restart}" if restart else "")


def file_names(directory: Path) -> list[str]:
    """Return a directory's file names in the order of starts; empty if it was removed."""
    return sorted(listed(str(directory)), key=by_start)


def by_start(name: str) -> tuple[int, int, int, str]:
    """Return the sort key of a file: attempt, restart, rank, name."""
    match = FILE_NAME.fullmatch(name)
    if match is None:
        return 0, 0, -1, name
    return int(match["attempt"] or 0), int(match["restart"] or 0), int(match["rank"]), name


def last_lines(path: Path, count: int = 20, limit: int = 8192) -> tuple[str, ...]:
    """Return the last lines of a regular file; empty if it cannot be read.

    Args:
        path: the file.
        count: the maximum number of lines.
        limit: the maximum number of bytes to read from the end.
    """
    data = b""
    with contextlib.suppress(OSError), open_regular(path) as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - limit))
        data = stream.read()
    lines = [shown(part).rstrip() for part in data.split(b"\n")]
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
    Appender(path).write(text.encode(errors="replace"))


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
        self.grown_at = time.monotonic()
        self.follow(directory / name for name in file_names(directory))

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
        # `follow` may add names meanwhile: an agent calls it in another thread.
        sizes = {name: size_of(self._directory / name) for name in list(self._sizes)}
        grown = sorted((name for name in sizes if sizes[name] > self._sizes[name]), key=by_start)
        if grown:
            self._sizes |= sizes
            self.grown_at = time.monotonic()
            moment = time.time()
            text = "".join(f"{moment:.3f} {name} {sizes[name]}\n" for name in grown)
            with contextlib.suppress(OSError):
                self._file.write(text.encode())
        return grown


@dataclass(slots=True)  # not frozen: a large output has millions of them
class LogLine:
    """One line of output.

    Attributes:
        node_rank: the node that wrote it.
        rank: the worker's rank.
        stream: ``out`` or ``err``.
        text: the line without its newline; bytes that are not UTF-8 are replaced by U+FFFD.
        seconds: time since the epoch at which the timeline recorded it; 0 without a record.
        ended: whether it has a newline; False for the last line of a file without one, and for
            parts of a line longer than `LONGEST`.
    """

    node_rank: int
    rank: int
    stream: str
    text: str
    seconds: float = field(default=0.0, compare=False)
    ended: bool = field(default=True, compare=False)


# A line to show, after the ranks of all its writers: ``0-3,5``.
Labelled = tuple[str, LogLine]


@dataclass
class LogFile:
    """A file that grows, or a timeline, as far as it was read.

    Attributes:
        node_rank, rank, stream: those of its lines.
        path: the file.
        raw: see `LogReader`.
        offset: the bytes that were read.
        rest: the beginning of a line that has no newline yet.
        late: whether that was recorded late enough for the reader.
    """

    node_rank: int
    rank: int
    stream: str
    path: Path
    raw: bool = False
    offset: int = 0
    rest: bytes = b""
    late: bool = True

    def lines_up_to(self, size: int | None, seconds: float = 0.0) -> Iterator[list[LogLine]]:
        """Yield the lines up to this file size, in batches that need little memory.

        Args:
            size: the size in bytes; None for the whole file.
            seconds: the time of the lines.
        """
        with contextlib.suppress(OSError), open_regular(self.path, buffering=0) as stream:
            end = os.fstat(stream.fileno()).st_size
            end = end if size is None else min(size, end)
            stream.seek(self.offset)
            while self.offset < end and (data := stream.read(min(_PIECE, end - self.offset))):
                self.offset += len(data)
                whole, found, rest = (self.rest + data).rpartition(b"\n")
                lines = self._lines(whole, seconds) if found else []
                self.rest = rest if self.raw else _without_overwritten(rest)
                if len(self.rest) >= LONGEST:
                    lines += self.last_line(seconds)
                yield lines

    def last_line(self, seconds: float) -> list[LogLine]:
        """Return the line without a newline, and forget it."""
        rest, self.rest = self.rest, b""
        return self._lines(rest, seconds, ended=False) if rest else []

    def skip_to_tail(self, count: int) -> None:
        """Continue shortly before the last `count` lines, without reading what is before them."""
        with contextlib.suppress(OSError), open_regular(self.path, buffering=0) as stream:
            begin, newlines, data = os.fstat(stream.fileno()).st_size, 0, b""
            while begin > 0 and newlines <= count:  # the last line may have a newline
                begin = max(0, begin - _PIECE)
                stream.seek(begin)
                data = stream.read(_PIECE)
                newlines += data.count(b"\n")
            self.offset = begin + (data.find(b"\n") + 1 if begin else 0)

    def _lines(self, data: bytes, seconds: float, *, ended: bool = True) -> list[LogLine]:
        """Return the lines of `data`, which lacks the last newline."""
        # Decode all lines at once: decoding line by line takes much longer.
        texts = data.decode(errors="surrogateescape" if self.raw else "replace").split("\n")
        if not self.raw and b"\r" in data:
            texts = [last_state(text) for text in texts]
        node_rank, rank, stream = self.node_rank, self.rank, self.stream
        return [
            LogLine(node_rank, rank, stream=stream, text=text, seconds=seconds, ended=ended)
            for text in texts
        ]


def _without_overwritten(part: bytes) -> bytes:
    """Return an incomplete line without the parts that a terminal would have overwritten.

    `shown` returns the same text for the shorter line, which needs less memory.
    """
    bare = part.rstrip(b"\r")
    return bare[bare.rfind(b"\r") + 1 :] + part[len(bare) :][:1]


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
        self._files: dict[tuple[int, str], LogFile] = {}
        self._timelines: dict[int, LogFile] = {}
        self._moment = 0.0

    def batches(self, *, end: bool) -> Iterator[list[LogLine]]:
        """Yield the complete lines that were recorded since the last call, in small batches.

        A batch is empty if only a line without a newline has grown.

        Args:
            end: whether to yield all remaining lines, including those without a newline: for a job
                that has ended, or to stop reading.
        """
        notes = map(self._notes, self._nodes())
        for seconds, node_rank, name, size in heapq.merge(*notes, key=operator.itemgetter(0)):
            self._moment = max(self._moment, seconds)
            file = self._file(node_rank, name)
            if file is not None:
                file.late = seconds >= self._begin(node_rank)
                lines = file.lines_up_to(size, seconds)
                yield from lines if file.late else ([] for _ in lines)
        for node_rank in self._nodes():
            # A node without an agent (``--launcher srun``) has no timeline.
            directory = node_directory(self._job_dir, node_rank)
            recorded = (directory / TIMELINE).exists() or (directory / AGENT_LOG).exists()
            moment = self._moment if recorded else time.time()
            for file in self._files_of(node_rank) if end or not recorded else ():
                noted = file.offset
                yield from file.lines_up_to(None, moment)
                if end:
                    last_line = file.last_line(moment)
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
            timeline = node_directory(self._job_dir, node_rank) / TIMELINE
            notes = map(NOTE.fullmatch, last_lines(timeline)) if self._last is not None else ()
            newest = max((float(note[1]) for note in notes if note is not None), default=0.0)
            self._begins[node_rank] = max(self._since or 0.0, newest - (self._last or 0.0))
        return self._begins[node_rank]

    def skip_to_tail(self, count: int) -> None:
        """Continue shortly before the last `count` lines of each file."""
        for node_rank in self._nodes():
            for file in self._files_of(node_rank):
                file.skip_to_tail(count)

    def positions(self) -> dict[str, int]:
        """Return how many bytes of each file were returned as lines; only for one node."""
        return {file.path.name: file.offset - len(file.rest) for file in self._files.values()}

    def continue_at(self, positions: Mapping[str, int]) -> None:
        """Continue where another reader of the same node has stopped: at its `positions`."""
        for node_rank in self._nodes():
            for file in self._files_of(node_rank):
                file.offset = positions.get(file.path.name, 0)

    def open_lines(self) -> list[LogLine]:
        """Return lines without a newline, such as progress bars, of each worker's newest files."""
        by_age = sorted(self._files.values(), key=lambda file: by_start(file.path.name))
        newest = {(file.node_rank, file.rank, file.stream): file for file in by_age}
        lines = [
            LogLine(
                file.node_rank,
                file.rank,
                stream=file.stream,
                text=shown(file.rest[-_MAX_OPEN:]),
                ended=False,
            )
            for file in newest.values()
            if file.rest.strip()
        ]
        return sorted(lines, key=lambda line: (line.node_rank, line.rank))

    def _notes(self, node_rank: int) -> Iterator[_Note]:
        """Yield the new records of a node's timeline."""
        path = node_directory(self._job_dir, node_rank) / TIMELINE
        timeline = self._timelines.setdefault(
            node_rank, LogFile(node_rank, -1, stream="out", path=path)
        )
        for line in itertools.chain.from_iterable(timeline.lines_up_to(None)):
            # A full disk may cut a line short.
            if (match := NOTE.fullmatch(line.text)) is not None:
                yield float(match[1]), node_rank, match[2], int(match[3])

    def _files_of(self, node_rank: int) -> Iterator[LogFile]:
        """Yield the files of a node that the reader returns, in the order of starts."""
        for name in file_names(node_directory(self._job_dir, node_rank)):
            file = self._file(node_rank, name)
            if file is not None:
                yield file

    def _nodes(self) -> list[int]:
        wanted = self._wanted_nodes
        return [node for node in nodes(self._job_dir) if wanted is None or node in wanted]

    def _file(self, node_rank: int, name: str) -> LogFile | None:
        match = FILE_NAME.fullmatch(name)
        if match is None:
            return None
        rank = int(match["rank"])
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
            LogFile(node_rank, rank, stream=match["stream"], path=path, raw=self._raw),
        )


def fold(batches: Iterable[list[LogLine]]) -> Iterator[list[Labelled]]:
    """Fold equal lines of several ranks; each rank's own lines keep their order.

    The oldest line is shown once, for all ranks whose next line is equal. Of another rank that
    writes it soon, the lines before it are shown first, unless the first rank writes them too.

    Args:
        batches: lines in order of time.

    Yields:
        The lines of at most `WINDOW` seconds, in parts that need little memory.
    """
    held: list[LogLine] = []
    size = 0
    for line in itertools.chain.from_iterable(batches):
        is_full = len(held) > _MAX_HELD or size > _MAX_HELD_BYTES
        if held and (is_full or line.seconds > held[0].seconds + WINDOW):
            yield _fold_part(held)
            held, size = [], 0
        held.append(line)
        size += len(line.text)
    if held:
        yield _fold_part(held)


def _fold_part(lines: list[LogLine]) -> list[Labelled]:
    # In a large output most lines occur once, so such a line must cost little time.
    counts = Counter(line.text for line in lines)
    waiting: dict[str, dict[int, deque[LogLine]]] = {"out": {}, "err": {}}  # by stream and rank
    for line in lines:
        waiting[line.stream].setdefault(line.rank, deque()).append(line)
    found: list[Labelled] = []

    def show(line: LogLine) -> None:
        """Take a line, which is its writer's next one, from all whose next line is equal."""
        same = [line.rank]
        queues = waiting[line.stream]
        if counts[line.text] > 1:
            same = [each for each, own in queues.items() if own and own[0].text == line.text]
        for each in same:
            queues[each].popleft()
        found.append((_joined(tuple(same)), line))

    for line in lines:
        own = waiting[line.stream][line.rank]
        if not own or own[0] is not line:
            continue  # it was shown with another rank's line
        if counts[line.text] > 1:
            texts = {each.text for each in itertools.islice(own, _MAX_AHEAD)}
            for its in waiting[line.stream].values():
                ahead = [each.text for each in itertools.islice(its, _MAX_AHEAD)]
                common = next((n for n, text in enumerate(ahead) if text in texts), 0)
                if common and ahead[common] == line.text:
                    for _ in range(common):
                        show(its[0])
        show(line)
    return found


def as_text(
    lines: Iterable[Labelled], shown: Callable[[str, LogLine], str]
) -> Iterator[tuple[str, str]]:
    """Join consecutive lines of one stream for one write; yield the stream's name and the text.

    Args:
        lines: the lines.
        shown: returns the text of a line and its ranks, with its newline.
    """
    for stream, together in itertools.groupby(lines, key=lambda pair: pair[1].stream):
        yield stream, "".join(itertools.starmap(shown, together))


@functools.lru_cache(maxsize=256)
def _joined(ranks: tuple[int, ...]) -> str:
    return ",".join(ranges(sorted(ranks)))
