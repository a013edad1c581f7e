"""Fold lines that several ranks write alike into one: ``[0-15] loading``."""

from __future__ import annotations

import functools
import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from clusterjob.node.logs.log_files import Line

WINDOW = 2.0  # seconds within which ranks write the same line
# Lines of one rank that may be shown before their time, so that a line behind them is folded.
_MOST_AHEAD = 32
_MOST_HELD, _MOST_HELD_BYTES = 5_000, 4 << 20  # lines that are held back for others like them
_MOST_AT_ONCE = 1 << 16  # characters that are shown with one write


class Folded(NamedTuple):
    """A line as it is shown: by whom, on which stream, what.

    Attributes:
        label: whose it is: ranks, nodes of a torchrun.
        stream: ``out`` or ``err``.
        text: the line without its end.
        ended: whether it has an end; see `clusterjob.node.logs.log_files.Line`.
    """

    label: str
    stream: str
    text: str
    ended: bool = True


class _Key(NamedTuple):
    """Who writes a line, and on which stream."""

    node: int  # of a torchrun, which has no rank; else -1
    rank: int
    stream: str


@dataclass(slots=True, eq=False)
class _Writer:
    """One writer's lines that were not shown, and how many were."""

    key: _Key
    label: str
    lines: deque[Line] = field(default_factory=deque)
    added: int = 0
    shown: int = 0
    passed: int = (
        0  # lines that have left the order of time, those that were shown with others included
    )
    newest: float = 0.0


# Where a text stands in each writer's lines, counted from 1. Most lines of a large output are
# written once: they need no tables.
_Once = tuple[_Writer, int]
_Often = dict[_Writer, "int | deque[int]"]


def fold(lines: Iterable[Line]) -> list[Folded]:
    """Merge lines that several ranks wrote alike; each rank's own lines keep their order."""
    folder = Folder()
    return [*folder.add(lines), *folder.flush()]


class Folder:
    """Folds a stream of lines: holds a line back until none like it, of about the same time, can
    come any more.

    The oldest line that was not shown yet is shown together with every other rank that writes the
    same within `WINDOW`. What such a rank has written before goes first, unless that, too, is still
    to come from the one whose line it is.

    Most lines of a large output are written by one rank alone: what is done for each of these is
    the time that `run` needs.
    """

    def __init__(self) -> None:
        self._waiting: deque[Line] = (
            deque()
        )  # in the order of time; those that were shown with others included
        self._whose: deque[_Writer] = deque()  # the writer of each
        self._writers: dict[_Key, _Writer] = {}
        self._sources: dict[tuple[int, int | None, str], _Writer] = {}
        self._places: dict[str, dict[str, _Once | _Often]] = {
            "out": {},
            "err": {},
        }  # by stream and text
        self._newest = 0.0
        self._bytes = 0

    def add(self, lines: Iterable[Line]) -> Iterator[Folded]:
        """Take lines in; yield those that are not held back any longer."""
        for source, run in itertools.groupby(lines, key=_source):
            if source not in self._sources:
                key = _key(*source)
                self._sources[source] = self._writers.setdefault(key, _Writer(key, _label((key,))))
            self._hold(self._sources[source], run)
        return self._release(all_=False)

    def flush(self) -> Iterator[Folded]:
        """Yield all lines that are held back."""
        return self._release(all_=True)

    def _hold(self, writer: _Writer, lines: Iterable[Line]) -> None:
        places = self._places[writer.key.stream]
        hold, hold_own, whose = self._waiting.append, writer.lines.append, self._whose.append
        number, newest, size = writer.added, writer.newest, 0
        for line in lines:
            if line.seconds != newest:
                if line.seconds < newest:
                    line = replace(line, seconds=newest)  # noqa: PLW2901 - its node's clock was set back
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
            or len(waiting) > _MOST_HELD
            or self._bytes > _MOST_HELD_BYTES
        ):
            line, writer = waiting.popleft(), self._whose.popleft()
            self._bytes -= len(line.text)
            writer.passed += 1
            if writer.passed <= writer.shown:
                continue  # it went with an earlier line of another rank
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

    def _together(self, writer: _Writer, line: Line, places: _Often) -> Iterator[Folded]:
        """Yield a line that others may write, too, after what these have written before."""
        until = line.seconds + WINDOW
        for other, place in sorted(
            self._others(writer, places, until=until), key=lambda pair: pair[0].key
        ):
            while other.shown + 1 < place:
                yield self._show(other.lines[0], until)
        yield self._show(line, until)

    def _others(self, writer: _Writer, places: _Often, until: float) -> list[tuple[_Writer, int]]:
        """Return who else writes this line soon, and where in their lines it stands, if what they
        write before may go first.
        """
        found = []
        for other, numbers in places.items():
            place = numbers if isinstance(numbers, int) else numbers[0]
            ahead = place - other.shown - 1
            if other is writer or not 0 < ahead <= _MOST_AHEAD:
                continue
            *before, same = itertools.islice(other.lines, ahead + 1)
            if same.seconds <= until and not any(
                self._comes(writer, each, until=until) for each in before
            ):
                found.append((other, place))
        return found

    def _comes(self, writer: _Writer, line: Line, until: float) -> bool:
        """Return whether a writer has this line, too, among those that were not shown."""
        places = self._places[line.stream][line.text]
        if isinstance(places, tuple) or writer not in places:
            return False  # the other's own
        return writer.lines[_first(places, writer) - writer.shown - 1].seconds <= until

    def _show(self, line: Line, until: float) -> Folded:
        """Show the next line of one rank, together with all whose next line is the same."""
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
    """Forget a writer's first place; return whether that was the last one of all."""
    numbers = places[writer]
    if isinstance(numbers, deque) and len(numbers) > 1:
        numbers.popleft()
    else:
        del places[writer]
    return not places


def as_text(lines: Iterable[Folded], shown: Callable[[Folded], str]) -> Iterator[tuple[str, str]]:
    """Yield lines that follow each other on one stream as one text, with the stream's name: one
    write in the place of many.

    Args:
        lines: the lines.
        shown: how each is shown, with its end.
    """
    stream, parts, size = "", list[str](), 0
    for line in lines:
        if parts and (line.stream != stream or size > _MOST_AT_ONCE):
            yield stream, "".join(parts)
            parts, size = [], 0
        text = shown(line)
        parts.append(text)
        stream, size = line.stream, size + len(text)
    if parts:
        yield stream, "".join(parts)


def label(line: Line) -> str:
    """Return whose line it is."""
    return _label((_key(*_source(line)),))


_source = operator.attrgetter("node_rank", "rank", "stream")


def _key(node_rank: int, rank: int | None, stream: str) -> _Key:
    return _Key(node_rank, -1, stream=stream) if rank is None else _Key(-1, rank, stream=stream)


@functools.lru_cache(maxsize=256)
def _label(keys: tuple[_Key, ...]) -> str:
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
