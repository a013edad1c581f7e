"""What a node's agent printed on a platform's log, sorted into the files of the job's directory,
where the one reader finds them.

The lines bear numbers (`clusterjob.node.logs.log_protocol`), so that it does not matter how often
and in which pieces they are fetched. Lines without one are setup lines' and the image's own words;
they go to ``agent.log``, and are known again by what stands around them.

Several processes may do this at once, and on different days: what was taken is noted in
``stream.json`` beside the logs, under a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from clusterjob.core.schema import Integer, ListOf, MapOf, Nullable, Number, Object, Row, Text
from clusterjob.errors import ClusterJobError
from clusterjob.node.logs import ends, log_files, log_protocol
from clusterjob.node.logs.log_protocol import Numbered
from clusterjob.node.system import files, private_dirs
from clusterjob.node.verdict import Verdict

_STATE, _LOCK, _OWN, _TIMELINE = "stream.json", "stream.lock", "agent.log", "timeline"
_OURS = re.compile(
    r"(?:rank\d+|torchrun)(?:\.attempt\d+)?\.(?:out|err)|agent\.log|timeline", re.ASCII
)
_MOST_KNOWN = 2000  # lines without a number that are known again
_MOST_GAPS = 200  # runs of lines that may still come
_MOST_FILES = 8192  # of one node, in one process; lines of more workers go to agent.log
_LONGEST_VERDICT = 32 << 20  # characters
_NUMBER, _NAMES = Integer(0, 2**53), ListOf(Text())
_SIZES = MapOf(_NUMBER)
_NOTE = Object(optional={
    "next": _NUMBER, "known": _NAMES, "bare": _NUMBER, "missing": ListOf(Row((_NUMBER, _NUMBER))),
    "open": _NAMES, "seconds": Number(), "verdict": Nullable(Object()),
    "verdict_part": Text(_LONGEST_VERDICT),
})  # fmt: skip


class Stream:
    """The lines of one node, in one start of the job.

    Args:
        job_dir: the job's directory here.
        node_rank: the node.
        attempt: which start of the job, from 0.
    """

    def __init__(self, job_dir: Path, node_rank: int, attempt: int = 0) -> None:
        self._job_dir = job_dir
        self._node_rank = node_rank
        self._attempt = attempt
        self._directory = log_files.node_directory(job_dir, node_rank)
        self._names: dict[tuple[str, str], list[str]] = {}  # of the files of a label, by stream

    @property
    def next_number(self) -> int:
        """The number that the next new line will bear."""
        return self._taken().next

    @property
    def verdict(self) -> Verdict | None:
        """How this start of the job ended, by node 0's agent; None until that line came, and for
        other nodes.
        """
        found = self._taken().verdict
        return None if found is None else replace(Verdict.from_json(found), attempt=self._attempt)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """The first and last numbers of the lines that are missing; they are taken if they come
        late.
        """
        return [(first, last) for first, last in self._taken().missing]

    def joins(self, lines: Sequence[str]) -> bool:
        """Return whether the end of a log reaches back to what was taken; if not, and it is not all
        of the log, ask for more of it.
        """
        taken = self._taken()
        first = len(lines)
        for index, line in enumerate(lines):
            item = log_protocol.parse(line)
            if item is not None and item.number < taken.next:
                return True
            if item is not None:
                first = min(first, index)
        return taken.known_of(lines[:first]) > 0

    def take(self, lines: Sequence[str]) -> None:
        """Add what is new to the files.

        Args:
            lines: any piece of the node's log, the oldest first: what was taken before is not taken
                again, wherever the piece begins. They were parted at line feeds alone (not by
                `str.splitlines`, which parts at more).

        Raises:
            ClusterJobError: the files cannot be written; what was there is as before.
        """
        if not lines:
            return
        try:
            private_dirs.make(self._directory)
            with self._locked():
                state = self._state()
                taken = _Taken.from_json(state["attempts"].get(str(self._attempt)))
                pages = _Pages(self._directory, state["sizes"])
                before = taken.to_json()
                self._sort(lines, taken, pages=pages)
                if taken.to_json() != before:
                    pages.write()
                    state["attempts"][str(self._attempt)] = taken.to_json()
                    files.write_json(self._directory / _STATE, state)
        except OSError as error:
            where = error.filename or self._directory
            raise ClusterJobError(
                f"the log of node {self._node_rank} cannot be kept here: {error.strerror}: {where}"
            ) from error

    def _sort(self, lines: Sequence[str], taken: _Taken, pages: _Pages) -> None:
        items = _in_order(lines)
        first = next(
            (
                index
                for index, (_, item) in enumerate(items)
                if item is not None and item.number >= taken.next
            ),
            len(items),
        )
        begin = _after_what_is_known(items, first, taken=taken)
        for index, (line, item) in enumerate(items):
            if item is None:
                if index >= begin:
                    self._put_bare(line, taken, pages=pages)
            elif item.number >= taken.next:
                self._note_gap(item.number, taken, pages=pages)
                taken.advance(item.number)
                self._put(item, taken, pages=pages)
            elif taken.was_missing(item.number):
                self._put(item, taken, pages=pages)
        pages.note(taken.seconds)

    def _put(self, item: Numbered, taken: _Taken, pages: _Pages) -> None:
        if item.seconds is not None and item.seconds > taken.seconds:
            pages.note(taken.seconds)
            taken.seconds = item.seconds
        if item.kind == "verdict":
            self._put_verdict(item, taken)
            return
        end = "" if item.more else "\n"
        if item.kind == "agent":
            pages.add(_OWN, ("" if _OWN in taken.open else "clusterjob: ") + item.text + end)
            taken.mark(_OWN, is_open=item.more)
            return
        for name in self._file_names(item.label, item.kind):
            pages.add(name, item.text + end)
            taken.mark(name, is_open=item.more)

    def _file_names(self, label: str, kind: str) -> list[str]:
        if (label, kind) not in self._names:
            pairs = [
                log_files.torchrun_files(self._directory, 0, attempt=self._attempt) if rank is None
                else log_files.rank_files(self._directory, rank, restart=0, attempt=self._attempt)
                for rank in log_protocol.ranks(label)
            ]  # fmt: skip
            names = {pair[kind == "err"].name: None for pair in pairs}
            known = {name for one in self._names.values() for name in one}
            self._names[label, kind] = (
                list(names) if len(known | names.keys()) <= _MOST_FILES else [_OWN]
            )
        return self._names[label, kind]

    def _put_bare(self, line: str, taken: _Taken, pages: _Pages) -> None:
        taken.remember(line)
        refused = log_protocol.parse_refusal(line)
        if refused is None:
            pages.add(_OWN, line.rstrip("\r\n") + "\n")
        else:
            ends.directory(self._job_dir).mkdir(mode=0o700, exist_ok=True)
            ends.refuse(self._job_dir, self._node_rank, self._attempt, *refused)

    def _put_verdict(self, item: Numbered, taken: _Taken) -> None:
        taken.verdict_part = (taken.verdict_part + item.text)[:_LONGEST_VERDICT]
        if item.more or self._node_rank != 0:
            return
        try:
            found = json.loads(taken.verdict_part)
            Verdict.from_json(found)
        except (ValueError, RecursionError):
            taken.verdict_part = ""  # a part of it was lost
            return
        taken.verdict, taken.verdict_part = found, ""

    def _note_gap(self, number: int, taken: _Taken, pages: _Pages) -> None:
        """Say which lines before this one are missing; what they would have gone on with ends
        there.
        """
        if number == taken.next:
            return
        for name in taken.open:
            pages.add(name, "\n")
        taken.open = []
        first, last = taken.next, number - 1
        which = f"line {first}" if first == last else f"lines {first} to {last}"
        pages.add(
            _OWN,
            f"clusterjob: {which} of node {self._node_rank} {'was' if first == last else 'were'} not to be had\n",
        )
        taken.missing = [*taken.missing, [first, last]][-_MOST_GAPS:]

    # -- what was taken ------------------------------------------------------------------------------------------------

    def _taken(self) -> _Taken:
        return _Taken.from_json(self._state()["attempts"].get(str(self._attempt)))

    def _state(self) -> dict[str, Any]:
        state: Any = files.read_json(self._directory / _STATE)
        try:
            _SIZES.check(state["sizes"], "sizes")
            attempts = {
                key: _Taken.from_json(taken).to_json() for key, taken in state["attempts"].items()
            }
            return {"sizes": state["sizes"], "attempts": attempts}
        except (KeyError, TypeError, ValueError, AttributeError):
            return {"sizes": {}, "attempts": {}}  # all is taken again

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        handle = os.open(self._directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


@dataclass
class _Taken:
    """What was taken of a node's lines.

    Attributes:
        next: the number that comes next.
        known: digests of the lines without a number; of many, the last.
        bare: how many of them came since the last line with one.
        missing: runs of numbers that were passed over.
        open: files whose last line goes on with the next number.
        seconds: when the last line was shown.
        verdict: the job's, as plain data.
        verdict_part: its text so far.
    """

    next: int = 1
    known: list[str] = field(default_factory=list)
    bare: int = 0
    missing: list[list[int]] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    seconds: float = 0.0
    verdict: dict[str, Any] | None = None
    verdict_part: str = ""

    @classmethod
    def from_json(cls, data: dict[str, Any] | None) -> _Taken:
        """Return what a note says.

        Raises:
            ValueError, TypeError: it is none.
        """
        if not data:
            return cls()
        _NOTE.check(data, "the note")
        if data.get("verdict") is not None:
            Verdict.from_json(data["verdict"])
        return cls(**json.loads(json.dumps(data)))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def advance(self, number: int) -> None:
        self.next, self.bare = number + 1, 0

    def remember(self, line: str) -> None:
        self.known.append(_digest(line))
        del self.known[:-_MOST_KNOWN]
        self.bare += 1

    def mark(self, name: str, *, is_open: bool) -> None:
        if is_open or self.open:
            self.open = [other for other in self.open if other != name] + [name] * is_open

    def was_missing(self, number: int) -> bool:
        """Return whether this line was passed over, and is to be taken now."""
        for index, (first, last) in enumerate(self.missing):
            if first <= number <= last:
                halves = [[first, number - 1], [number + 1, last]]
                self.missing[index : index + 1] = [half for half in halves if half[0] <= half[1]]
                return True
        return False

    def known_of(self, lines: Sequence[str]) -> int:
        """Return how many of these lines without a number, which stand where the known ones do,
        were taken: the first so many.

        Where the piece of the log begins is not known. If it begins with the first of them, that is
        certain; else the longest run with which the known ones end and the piece begins is taken
        for the same.
        """
        digests = [_digest(line) for line in lines]
        known = self.known[-self.bare :] if self.bare else []
        if not known or not digests:
            return 0
        if digests[: self.bare][-len(known) :] == known and len(digests) >= self.bare:
            return self.bare
        if _holds(known, digests):
            return len(digests)
        longest = min(len(known), len(digests))
        return next(
            (count for count in range(longest, 0, -1) if known[-count:] == digests[:count]), 0
        )

    def is_older(self, lines: Sequence[str]) -> bool:
        """Return whether a piece without any number is of what came before the last number."""
        return _holds(self.known[: len(self.known) - self.bare], [_digest(line) for line in lines])


def _holds(whole: list[str], part: list[str]) -> bool:
    return any(
        whole[begin : begin + len(part)] == part for begin in range(len(whole) - len(part) + 1)
    )


def _digest(line: str) -> str:
    return hashlib.blake2b(
        line.rstrip("\r\n").encode(errors="surrogatepass"), digest_size=6
    ).hexdigest()


def _in_order(lines: Sequence[str]) -> list[tuple[str, Numbered | None]]:
    """Return lines with what they say; those with a number in its order: a log may show lines of
    one moment in any.
    """
    items = [(line, log_protocol.parse(line)) for line in lines]
    places = [index for index, (_, item) in enumerate(items) if item is not None]
    ordered = sorted(
        (items[index] for index in places), key=lambda pair: pair[1].number if pair[1] else 0
    )
    for index, pair in zip(places, ordered, strict=True):
        items[index] = pair
    return items


def _after_what_is_known(
    items: Sequence[tuple[str, Numbered | None]], first: int, taken: _Taken
) -> int:
    """Return from where on lines without a number are new; `first` is the first line whose number
    is.
    """
    before = next(
        (index for index in range(first - 1, -1, -1) if items[index][1] is not None), None
    )
    last = items[before][1] if before is not None else None
    run = 0 if before is None else before + 1
    if last is not None and last.number == taken.next - 1:
        return min(first, run + taken.bare)
    if last is not None and first == len(items):
        return first  # an older piece
    follower = items[first][1] if first < len(items) else None
    if follower is not None and follower.number > taken.next and last is None:
        return run  # behind a gap
    bare = [line for line, _ in items[run:first]]
    if last is None and follower is None and taken.is_older(bare):
        return first
    return run + taken.known_of(bare)


class _Pages:
    """The files of a node that grow; what a process that died had added without noting it is cut
    off again.
    """

    def __init__(self, directory: Path, sizes: dict[str, int]) -> None:
        self._directory = directory
        self._sizes = sizes  # noted in the state when all was written
        self._added: dict[str, bytearray] = {}
        self._grown: dict[str, None] = {}  # since the last note
        for path in directory.iterdir():
            if _OURS.fullmatch(path.name):
                size, noted = path.stat().st_size, sizes.get(path.name, 0)
                if size > noted:
                    os.truncate(path, noted)
                sizes[path.name] = min(size, noted)

    def add(self, name: str, text: str) -> None:
        self._added.setdefault(name, bytearray()).extend(text.encode(errors="backslashreplace"))
        if name not in (_OWN, _TIMELINE):
            self._grown[name] = None

    def note(self, seconds: float) -> None:
        """Note how far the workers' files have grown at a moment, for the reader's order of time."""
        for name in sorted(self._grown):
            self.add(
                _TIMELINE,
                f"{seconds:.3f} {name} {self._sizes.get(name, 0) + len(self._added[name])}\n",
            )
        self._grown = {}

    def write(self) -> None:
        for name in sorted(
            self._added, key=lambda name: name == _TIMELINE
        ):  # last: a reader never hears of bytes that are not there
            handle = os.open(self._directory / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                offset = self._sizes.get(name, 0)
                view = memoryview(bytes(self._added[name]))
                while view:
                    written = os.pwrite(handle, view, offset)
                    view, offset = view[written:], offset + written
            finally:
                os.close(handle)
            self._sizes[name] = offset
