"""Sort the lines of a node's log on the platform into the log files of the job's directory.

The agent numbers its lines (`clusterjob.node.logs.log_protocol`), so that the log may be fetched
repeatedly and in any pieces. Lines without a number are output of setup lines or of the image. They
are written to ``agent.log``; a line that was fetched before is recognised by its neighbours.

Several processes may sort lines, at the same time or on different days: ``stream.json`` in the
directory of the logs records the lines taken so far, under a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from clusterjob.backends.batch_command.taken_lines import Count, TakenLines
from clusterjob.errors import ClusterJobError
from clusterjob.node.logs import ends, log_files, log_protocol
from clusterjob.node.logs.job_dir import AGENT_LOG, TIMELINE
from clusterjob.node.logs.log_protocol import NumberedLine
from clusterjob.node.system import files, private_dirs
from clusterjob.node.verdict import Verdict

_STATE, _LOCK = "stream.json", "stream.lock"
_OURS = re.compile(
    r"(?:rank\d+|torchrun)(?:\.attempt\d+)?\.(?:out|err)|agent\.log|timeline", re.ASCII
)
_MAX_GAPS = 200  # maximum number of ranges of missing lines to remember
_MAX_FILES = 8192  # maximum files per node and process; lines of more workers go to agent.log
_Sizes = Annotated[dict[str, Count], Meta(max_length=10_000)]


class LogStream:
    """The log lines of one node in one attempt of the job.

    Args:
        job_dir: the job's directory on this machine.
        node_rank: the node's rank.
        attempt: the number of the attempt, from 0.
    """

    def __init__(self, job_dir: Path, node_rank: int, attempt: int = 0) -> None:
        self._job_dir = job_dir
        self._node_rank = node_rank
        self._attempt = attempt
        self._directory = log_files.node_directory(job_dir, node_rank)
        self._names: dict[tuple[str, str], list[str]] = {}  # file names by (label, stream)

    @property
    def next_number(self) -> int:
        """The number of the next new line."""
        return self._taken().next

    @property
    def verdict(self) -> Verdict | None:
        """The verdict of this attempt, from node 0's agent; None before it, and on other nodes."""
        found = self._taken().verdict
        return None if found is None else replace(Verdict.from_json(found), attempt=self._attempt)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """The (first, last) numbers of missing lines; they are added if they arrive later."""
        return [(first, last) for first, last in self._taken().missing]

    def joins(self, lines: Sequence[str]) -> bool:
        """Return whether the end of a log overlaps the lines taken so far.

        If not, the lines in between are missing. Then fetch more lines, unless `lines` is the whole
        log.
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
        """Add new lines to the files.

        Args:
            lines: any piece of the node's log, the oldest line first. The piece may begin at any
                line; lines that were taken before are skipped. Split the log at line feeds only:
                `str.splitlines` splits at more characters.

        Raises:
            ClusterJobError: the files cannot be written; they are unchanged.
        """
        if not lines:
            return
        try:
            private_dirs.make(self._directory)
            with self._locked():
                state = self._state()
                taken = TakenLines.from_json(state["attempts"].get(str(self._attempt)))
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

    def _sort(self, lines: Sequence[str], taken: TakenLines, pages: _Pages) -> None:
        items = _in_order(lines)
        first = next(
            (
                index
                for index, (_, item) in enumerate(items)
                if item is not None and item.number >= taken.next
            ),
            len(items),
        )
        begin = _first_new(items, first, taken=taken)
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

    def _put(self, item: NumberedLine, taken: TakenLines, pages: _Pages) -> None:
        if item.seconds is not None and item.seconds > taken.seconds:
            pages.note(taken.seconds)
            taken.seconds = item.seconds
        if item.kind == "verdict":
            complete = not item.more and self._node_rank == 0
            taken.add_verdict(item.text, complete=complete)
            return
        end = "" if item.more else "\n"
        if item.kind == "agent":
            pages.add(
                AGENT_LOG, ("" if AGENT_LOG in taken.open else "clusterjob: ") + item.text + end
            )
            taken.mark(AGENT_LOG, is_open=item.more)
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
                list(names) if len(known | names.keys()) <= _MAX_FILES else [AGENT_LOG]
            )
        return self._names[label, kind]

    def _put_bare(self, line: str, taken: TakenLines, pages: _Pages) -> None:
        taken.remember(line)
        refused = log_protocol.parse_refusal(line)
        if refused is None:
            pages.add(AGENT_LOG, line.rstrip("\r\n") + "\n")
        else:
            ends.directory(self._job_dir).mkdir(mode=0o700, exist_ok=True)
            ends.refuse(self._job_dir, self._node_rank, self._attempt, *refused)

    def _note_gap(self, number: int, taken: TakenLines, pages: _Pages) -> None:
        """Report the missing lines before line `number`, and end unfinished earlier lines."""
        if number == taken.next:
            return
        for name in taken.open:
            pages.add(name, "\n")
        taken.open = []
        first, last = taken.next, number - 1
        which = f"line {first}" if first == last else f"lines {first} to {last}"
        pages.add(
            AGENT_LOG,
            f"clusterjob: {which} of node {self._node_rank} "
            f"{'is' if first == last else 'are'} missing in the platform's log\n",
        )
        taken.missing = [*taken.missing, [first, last]][-_MAX_GAPS:]

    # -- the stored state --------------------------------------------------------------------------

    def _taken(self) -> TakenLines:
        return TakenLines.from_json(self._state()["attempts"].get(str(self._attempt)))

    def _state(self) -> dict[str, Any]:
        state: Any = files.read_json(self._directory / _STATE)
        try:
            sizes = msgspec.convert(state["sizes"], _Sizes)
            attempts = {
                key: TakenLines.from_json(taken).to_json()
                for key, taken in state["attempts"].items()
            }
            return {"sizes": sizes, "attempts": attempts}
        except (KeyError, TypeError, ValueError, AttributeError):
            return {"sizes": {}, "attempts": {}}  # the file is invalid: add all lines again

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        handle = os.open(self._directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def _in_order(lines: Sequence[str]) -> list[tuple[str, NumberedLine | None]]:
    """Parse lines, sort the numbered lines; a log may show lines of one moment in any order."""
    items = [(line, log_protocol.parse(line)) for line in lines]
    places = [index for index, (_, item) in enumerate(items) if item is not None]
    ordered = sorted(
        (items[index] for index in places), key=lambda pair: pair[1].number if pair[1] else 0
    )
    for index, pair in zip(places, ordered, strict=True):
        items[index] = pair
    return items


def _first_new(
    items: Sequence[tuple[str, NumberedLine | None]], first: int, taken: TakenLines
) -> int:
    """Return the index from which lines without a number are new.

    Args:
        items: the lines and their parsed form.
        first: the index of the first line with a new number; `len(items)` if there is none.
        taken: the lines taken so far.
    """
    before = next(
        (index for index in range(first - 1, -1, -1) if items[index][1] is not None), None
    )
    last = items[before][1] if before is not None else None
    run = 0 if before is None else before + 1
    if last is not None and last.number == taken.next - 1:
        return min(first, run + taken.bare)
    if last is not None and first == len(items):
        return first  # all lines of the piece are before the newest known line
    follower = items[first][1] if first < len(items) else None
    if follower is not None and follower.number > taken.next and last is None:
        return run  # the lines follow a gap
    bare = [line for line, _ in items[run:first]]
    if last is None and follower is None and taken.is_older(bare):
        return first
    return run + taken.known_of(bare)


class _Pages:
    """The growing files of a node, to which new lines are added.

    At first, each file is truncated to the size that the stored state records: a process that
    died may have added lines without recording them.
    """

    def __init__(self, directory: Path, sizes: dict[str, int]) -> None:
        self._directory = directory
        self._sizes = sizes  # stored in the state after all files are written
        self._added: dict[str, bytearray] = {}
        # Files that have grown since the last entry of the timeline.
        self._grown: dict[str, None] = {}
        for path in directory.iterdir():
            if _OURS.fullmatch(path.name):
                size, noted = path.stat().st_size, sizes.get(path.name, 0)
                if size > noted:
                    os.truncate(path, noted)
                sizes[path.name] = min(size, noted)

    def add(self, name: str, text: str) -> None:
        self._added.setdefault(name, bytearray()).extend(text.encode(errors="backslashreplace"))
        if name not in (AGENT_LOG, TIMELINE):
            self._grown[name] = None

    def note(self, seconds: float) -> None:
        """Add the sizes of the workers' files to the timeline; readers order the lines by it."""
        for name in sorted(self._grown):
            self.add(
                TIMELINE,
                f"{seconds:.3f} {name} {self._sizes.get(name, 0) + len(self._added[name])}\n",
            )
        self._grown = {}

    def write(self) -> None:
        # Write the timeline last: it must not refer to bytes that are not written yet.
        for name in sorted(self._added, key=lambda name: name == TIMELINE):
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
