"""Fold equal lines of several ranks into one: ``[0-15] loading``."""

from __future__ import annotations

import functools
import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from clusterjob.node.logs.log_reader import LogLine
from clusterjob.node.system.ranges import ranges

WINDOW = 2.0  # seconds within which equal lines of several ranks are folded
# Lines of one rank that may be shown early, so that a later line of the rank can be folded.
_MAX_AHEAD = 32
_MAX_HELD, _MAX_HELD_BYTES = 5_000, 4 << 20  # maximum lines and bytes to hold back
_MAX_AT_ONCE = 1 << 16  # maximum characters to show with one write


class Folded(NamedTuple):
    """A line to show, with the ranks that wrote it.

    Attributes:
        label: the ranks that wrote it, or the nodes whose torchrun did.
        stream: ``out`` or ``err``.
        text: the line without its newline.
        ended: whether it has a newline; see `clusterjob.node.logs.log_reader.LogLine`.
    """

    label: str
    stream: str
    text: str
    ended: bool = True


class _Key(NamedTuple):
    """The writer of a line and the stream."""

    node: int  # the node of a torchrun, which has no rank; else -1
    rank: int
    stream: str


@dataclass(slots=True, eq=False)
class _Writer:
    """One writer's lines that are not shown yet, and counts of its lines."""

    key: _Key
    label: str
    lines: deque[LogLine] = field(default_factory=deque)
    added: int = 0
    shown: int = 0
    passed: int = 0  # lines taken from the queue, including those already shown with other ranks
    newest: float = 0.0


# Positions of a text in each writer's lines, counted from 1. Most lines of a large output occur
# once and need no dict.
_Once = tuple[_Writer, int]
_Often = dict[_Writer, "int | deque[int]"]


def fold(lines: Iterable[LogLine]) -> list[Folded]:
    """Fold equal lines of several ranks; each rank's own lines keep their order."""
    folder = Folder()
    return [*folder.add(lines), *folder.flush()]


class Folder:
    """Fold a stream of lines; hold a line back until no equal line within `WINDOW` can follow.

    The oldest waiting line is shown once, for all ranks that write the same line within `WINDOW`.
    The earlier lines of these ranks are shown before it. A rank is left out if the first rank will
    also write one of that rank's earlier lines.

    In a large output, most lines occur on one rank only, so such a line must cost little time.
    """

    def __init__(self) -> None:
        # In the order of time, including lines already shown with other ranks.
        self._waiting: deque[LogLine] = deque()
        self._whose: deque[_Writer] = deque()  # the writer of each waiting line
        self._writers: dict[_Key, _Writer] = {}
        self._sources: dict[tuple[int, int | None, str], _Writer] = {}
        # By stream and text.
        self._places: dict[str, dict[str, _Once | _Often]] = {"out": {}, "err": {}}
        self._newest = 0.0
        self._bytes = 0

    def add(self, lines: Iterable[LogLine]) -> Iterator[Folded]:
        """Add lines; yield the lines that are no longer held back."""
        for source, run in itertools.groupby(lines, key=_source):
            if source not in self._sources:
                key = _key(*source)
                self._sources[source] = self._writers.setdefault(key, _Writer(key, _label((key,))))
            self._hold(self._sources[source], run)
        return self._release(all_=False)

    def flush(self) -> Iterator[Folded]:
        """Yield all lines that are still held back."""
        return self._release(all_=True)

    def _hold(self, writer: _Writer, lines: Iterable[LogLine]) -> None:
        places = self._places[writer.key.stream]
        hold, hold_own, whose = self._waiting.append, writer.lines.append, self._whose.append
        number, newest, size = writer.added, writer.newest, 0
        for line in lines:
            if line.seconds != newest:
                if line.seconds < newest:
                    line = replace(line, seconds=newest)  # noqa: PLW2901 - the clock was set back
                newest = line.seconds
            hold_own(line)
            hold(line)
            whose(writer)
            text = line.text
            number, size = number + 1, size + len(text)
            place = (writer, number)
            known = places.setdefault(text, place)
            if known is not place:
                if isinstance(known, tuple):
                    known = places[text] = {known[0]: known[1]}
                before = known.setdefault(writer, number)
                if isinstance(before, deque):
                    before.append(number)
                elif before != number:
                    known[writer] = deque((before, number))
        writer.added, writer.newest = number, newest
        self._newest = max(self._newest, newest)
        self._bytes += size

    def _release(self, *, all_: bool) -> Iterator[Folded]:
        waiting = self._waiting
        while waiting and (
            all_
            or waiting[0].seconds + WINDOW < self._newest
            or len(waiting) > _MAX_HELD
            or self._bytes > _MAX_HELD_BYTES
        ):
            line, writer = waiting.popleft(), self._whose.popleft()
            self._bytes -= len(line.text)
            writer.passed += 1
            if writer.passed <= writer.shown:
                continue  # it was shown with a line of another rank
            places = self._places[line.stream]
            known = places[line.text]
            if isinstance(known, dict) and len(known) > 1:
                yield from self._together(writer, line, places=known)
                continue
            if isinstance(known, tuple) or _drop_first(known, writer):
                del places[line.text]
            writer.lines.popleft()
            writer.shown += 1
            yield Folded(writer.label, line.stream, text=line.text, ended=line.ended)

    def _together(self, writer: _Writer, line: LogLine, places: _Often) -> Iterator[Folded]:
        """Yield a line, folded with the ranks that also write it, after their earlier lines."""
        until = line.seconds + WINDOW
        for other, place in sorted(
            self._others(writer, places, until=until), key=lambda pair: pair[0].key
        ):
            while other.shown + 1 < place:
                yield self._show(other.lines[0], until)
        yield self._show(line, until)

    def _others(self, writer: _Writer, places: _Often, until: float) -> list[tuple[_Writer, int]]:
        """Return the other writers of a line within the window, each with the position of the line.

        A writer is left out if its earlier lines cannot be shown first.
        """
        found = []
        for other, numbers in places.items():
            place = numbers if isinstance(numbers, int) else numbers[0]
            ahead = place - other.shown - 1
            if other is writer or not 0 < ahead <= _MAX_AHEAD:
                continue
            *before, same = itertools.islice(other.lines, ahead + 1)
            if same.seconds <= until and not any(
                self._comes(writer, each, until=until) for each in before
            ):
                found.append((other, place))
        return found

    def _comes(self, writer: _Writer, line: LogLine, until: float) -> bool:
        """Return whether this writer will also show an equal line, written before `until`."""
        places = self._places[line.stream][line.text]
        if isinstance(places, tuple) or writer not in places:
            return False  # only the other writer has the line
        return writer.lines[_first(places, writer) - writer.shown - 1].seconds <= until

    def _show(self, line: LogLine, until: float) -> Folded:
        """Return the next line of one rank, folded with all ranks whose next line is equal."""
        by_text = self._places[line.stream]
        known = by_text[line.text]
        places: _Often = {known[0]: known[1]} if isinstance(known, tuple) else known
        same = [
            each
            for each in places
            if _first(places, each) == each.shown + 1 and each.lines[0].seconds <= until
        ]
        for each in same:
            each.lines.popleft()
            each.shown += 1
            if _drop_first(places, each):
                del by_text[line.text]
        return Folded(
            _label(tuple([each.key for each in same])),
            line.stream,
            text=line.text,
            ended=line.ended,
        )


def _first(places: _Often, writer: _Writer) -> int:
    numbers = places[writer]
    return numbers if isinstance(numbers, int) else numbers[0]


def _drop_first(places: _Often, writer: _Writer) -> bool:
    """Remove a writer's first position; return whether no position of any writer is left."""
    numbers = places[writer]
    if isinstance(numbers, deque) and len(numbers) > 1:
        numbers.popleft()
    else:
        del places[writer]
    return not places


def as_text(lines: Iterable[Folded], shown: Callable[[Folded], str]) -> Iterator[tuple[str, str]]:
    """Join consecutive lines of one stream for one write; yield the stream's name and the text.

    Args:
        lines: the lines.
        shown: returns the text of a line, with its newline.
    """
    stream, parts, size = "", list[str](), 0
    for line in lines:
        if parts and (line.stream != stream or size > _MAX_AT_ONCE):
            yield stream, "".join(parts)
            parts, size = [], 0
        text = shown(line)
        parts.append(text)
        stream, size = line.stream, size + len(text)
    if parts:
        yield stream, "".join(parts)


def label(line: LogLine) -> str:
    """Return the label of a line's writer."""
    return _label((_key(*_source(line)),))


_source = operator.attrgetter("node_rank", "rank", "stream")


def _key(node_rank: int, rank: int | None, stream: str) -> _Key:
    return _Key(node_rank, -1, stream=stream) if rank is None else _Key(-1, rank, stream=stream)


@functools.lru_cache(maxsize=256)
def _label(keys: tuple[_Key, ...]) -> str:
    nodes = [f"node{key.node}" for key in sorted(keys) if key.rank < 0]
    return ",".join(nodes + ranges(sorted(key.rank for key in keys if key.rank >= 0)))
