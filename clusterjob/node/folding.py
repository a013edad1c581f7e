"""Fold lines that several ranks write alike into one: ``[0-15] loading``."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from clusterjob.node.logs import Line

WINDOW = 2.0  # seconds within which ranks write the same line
_MOST_AHEAD = 32  # lines of one rank that may be shown before their time, so that a line behind them is folded
_MOST_HELD, _MOST_HELD_BYTES = 5_000, 4 << 20  # lines that are held back for others like them


@dataclass(frozen=True)
class Folded:
    """A line as it is shown: by whom, on which stream, what.

    Attributes:
        label: whose it is: ranks, nodes of a torchrun.
        stream: ``out`` or ``err``.
        text: the line without its end.
        ended: whether it has an end; see `clusterjob.node.logs.Line`.
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


def fold(lines: Iterable[Line]) -> list[Folded]:
    """Merge lines that several ranks wrote alike; each rank's own lines keep their order."""
    folder = Folder()
    return [*folder.add(lines), *folder.flush()]


class Folder:
    """Folds a stream of lines: holds a line back until none like it, of about the same time, can come any more.

    The oldest line that was not shown yet is shown together with every other rank that writes the same within `WINDOW`. What such a
    rank has written before goes first, unless that, too, is still to come from the one whose line it is.
    """

    def __init__(self) -> None:
        self._waiting: deque[Line] = deque()  # in the order of time; those that were shown with others included
        self._queues: dict[_Key, deque[Line]] = {}  # each writer's lines that were not shown
        self._places: dict[tuple[str, str], dict[_Key, deque[int]]] = {}  # of a text: where in each writer's lines it stands
        self._added: dict[_Key, int] = {}
        self._shown: dict[_Key, int] = {}
        self._passed: dict[_Key, int] = {}
        self._newest = 0.0
        self._bytes = 0

    def add(self, lines: Iterable[Line]) -> Iterator[Folded]:
        """Take lines in; yield those that are not held back any longer."""
        for line in lines:
            key = _key(line)
            self._waiting.append(line)
            self._queues.setdefault(key, deque()).append(line)
            number = self._added[key] = self._added.get(key, 0) + 1
            self._places.setdefault((line.stream, line.text), {}).setdefault(key, deque()).append(number)
            self._newest = max(self._newest, line.seconds)
            self._bytes += len(line.text)
        while self._waiting and self._is_due(self._waiting[0]):
            yield from self._next()

    def flush(self) -> Iterator[Folded]:
        """Yield all lines that are held back."""
        while self._waiting:
            yield from self._next()

    def _is_due(self, line: Line) -> bool:
        return line.seconds + WINDOW < self._newest or len(self._waiting) > _MOST_HELD or self._bytes > _MOST_HELD_BYTES

    def _next(self) -> Iterator[Folded]:
        line = self._waiting.popleft()
        self._bytes -= len(line.text)
        key = _key(line)
        self._passed[key] = self._passed.get(key, 0) + 1
        if self._passed[key] <= self._shown.get(key, 0):
            return  # it went with an earlier line of another rank
        until = line.seconds + WINDOW
        for other, place in sorted(self._others(line, key, until)):
            while self._shown.get(other, 0) + 1 < place:
                yield self._show(self._queues[other][0], until)
        yield self._show(line, until)

    def _others(self, line: Line, key: _Key, until: float) -> Iterator[tuple[_Key, int]]:
        """Yield who else writes this line soon, and where in their lines it stands, if what they write before may go first."""
        for other, places in self._places[line.stream, line.text].items():
            ahead = places[0] - self._shown.get(other, 0) - 1
            if other == key or not 0 < ahead <= _MOST_AHEAD:
                continue
            *before, same = itertools.islice(self._queues[other], ahead + 1)
            if same.seconds <= until and not any(self._comes(key, each, until) for each in before):
                yield other, places[0]

    def _comes(self, key: _Key, line: Line, until: float) -> bool:
        """Return whether a writer has this line, too, among those that were not shown."""
        places = self._places[line.stream, line.text].get(key)
        return places is not None and self._queues[key][places[0] - self._shown.get(key, 0) - 1].seconds <= until

    def _show(self, line: Line, until: float) -> Folded:
        """Show the next line of one rank, together with all whose next line is the same."""
        heads = self._places[line.stream, line.text]
        same = [key for key, places in heads.items() if places[0] == self._shown.get(key, 0) + 1 and self._queues[key][0].seconds <= until]
        for key in same:
            self._queues[key].popleft()
            self._shown[key] = self._shown.get(key, 0) + 1
            heads[key].popleft()
            if not heads[key]:
                del heads[key]
        if not heads:
            del self._places[line.stream, line.text]
        return Folded(_label(same), line.stream, line.text, line.ended)


def label(line: Line) -> str:
    """Return whose line it is."""
    return _label([_key(line)])


def _key(line: Line) -> _Key:
    return _Key(line.node_rank, -1, line.stream) if line.rank is None else _Key(-1, line.rank, line.stream)


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
