"""Sort the lines of a node's log on the platform into the log files of the job's directory.

The agent numbers its lines (`clusterjob.node.logs.console`), so that the log may be fetched
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
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec

from clusterjob.backends.batch_command.platform import Instance, Platform, in_parallel
from clusterjob.backends.batch_command.taken_lines import Count, TakenLines
from clusterjob.errors import ClusterJobError
from clusterjob.node.logs import ends, log_files
from clusterjob.node.logs.job_dir import AGENT_LOG, TIMELINE
from clusterjob.node.system import files, private_dirs
from clusterjob.node.verdict import Verdict, bounded

_STATE, _LOCK = "stream.json", "stream.lock"
_OURS = re.compile(r"rank\d+(?:\.attempt\d+)?\.(?:out|err)|agent\.log|timeline", re.ASCII)
_private = partial(os.open, mode=0o600)  # opens a file that other users cannot read
_MAX_GAPS = 200  # maximum number of ranges of missing lines to remember
_MAX_FILES = 8192  # maximum files per node and process; lines of more workers go to agent.log
# Lines of a worker's log in the first request; maximum lines in one request.
_LINES, _MAX_LINES = 500, 128_000
_LINE = re.compile(
    r"(?P<number>[1-9]\d{0,11})(?:@(?P<seconds>\d{1,12}\.\d))? "
    r"(?:\[(?P<label>\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*)\](?P<err>!?)"
    r"|clusterjob(?P<own>:|-verdict))"
    r"(?P<more>\+?)(?: (?P<text>.*))?",
    re.ASCII | re.DOTALL,
)
_REFUSED = re.compile(r"clusterjob-refused (?P<code>\d{1,3}) (?P<why>.*)", re.ASCII | re.DOTALL)
_MAX_RANKS_OF_LABEL = 1025  # ranks; no node has more workers


@dataclass(frozen=True)
class NumberedLine:
    """A numbered line.

    Attributes:
        number: the position among this node's lines, from 1.
        kind: ``out`` or ``err`` of workers, ``agent`` or ``verdict``.
        label: the ranks that wrote a worker's line; see `label_ranks`.
        text: the text after the label.
        more: whether the text continues on the next line.
        seconds: time since the epoch at which it was shown; None for the previous line's time.
    """

    number: int
    kind: str
    label: str
    text: str
    more: bool = False
    seconds: float | None = None


def parse_line(line: str) -> NumberedLine | None:
    """Parse a numbered line; return None for any other line, such as the output of a setup line."""
    match = _LINE.fullmatch(line.rstrip("\r\n"))
    if match is None:
        return None
    kinds = {":": "agent", "-verdict": "verdict", None: "err" if match["err"] else "out"}
    return NumberedLine(
        int(match["number"]),
        kinds[match["own"]],
        label=match["label"] or "",
        text=match["text"] or "",
        more=bool(match["more"]),
        seconds=float(match["seconds"]) if match["seconds"] else None,
    )


def label_ranks(label: str) -> list[int]:
    """Return the ranks of a label."""
    found: list[int] = []
    for part in label.split(","):
        first, _, last = part.partition("-")
        room = _MAX_RANKS_OF_LABEL - len(found)
        found += range(int(first), int(last or first) + 1)[:room]
    return found


def parse_refusal(line: str) -> tuple[int, str] | None:
    """Return the exit code and ``host: why`` of a `refusal_line`; None for any other line."""
    match = _REFUSED.fullmatch(line.rstrip("\r\n"))
    return None if match is None else (int(match["code"]), match["why"])


class LogCollector:
    """Copies logs of workers, and remembers how many lines the last request for each log needed."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, int], int] = {}  # by task id and node rank

    def collect(
        self,
        job_dir: Path,
        platform: Platform,
        task_id: str,
        attempt: int,
        instances: Sequence[Instance],
    ) -> None:
        """Copy the current logs of some workers of a task into the job's directory, in parallel.

        A request returns the last lines of a log. If they do not overlap the lines copied before,
        a request for more lines follows.

        Args:
            job_dir: the job's directory on this machine.
            platform: the platform.
            task_id: the task.
            attempt: the number of the task's attempt, from 0.
            instances: the workers.

        Raises:
            ClusterJobError: the platform does not answer, or the logs cannot be written.
        """

        def collect(instance: Instance) -> None:
            stream = LogStream(job_dir, instance.node_rank, attempt=attempt)
            key = (task_id, instance.node_rank)
            count = self._lines.get(key, _LINES)
            while True:
                lines = platform.lines(task_id, instance.name, count)
                if len(lines) < count or stream.joins(lines) or count >= _MAX_LINES:
                    break
                count *= 4
            self._lines[key] = min(count, _MAX_LINES)
            stream.take(lines)

        in_parallel(collect, instances)


@dataclass
class _State:
    """The content of `_STATE`: the size of each file, and the lines taken in each attempt."""

    sizes: Annotated[dict[str, Count], msgspec.Meta(max_length=10_000)]
    attempts: dict[str, TakenLines]


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
        attempts = self._state().attempts
        verdicts = {
            number: Verdict.from_json(taken.verdict)
            for number in range(self._attempt + 1)
            if (taken := attempts.get(str(number))) is not None and taken.verdict is not None
        }
        if self._attempt not in verdicts:
            return None
        # The agents of an attempt know neither its number nor the earlier attempts.
        rounds = [
            replace(each, attempt=number)
            for number, verdict in verdicts.items()
            for each in verdict.attempts
        ]
        own = verdicts[self._attempt]
        return replace(own, attempt=self._attempt, attempts=bounded(rounds))

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """The (first, last) numbers of missing lines; a line that arrives later is still added."""
        return [(first, last) for first, last in self._taken().missing]

    def joins(self, lines: Sequence[str]) -> bool:
        """Return whether the last lines of a log overlap the lines taken so far.

        If they do not, the lines in between are missing: fetch more lines if the log has more.
        """
        taken = self._taken()
        first = len(lines)
        for index, line in enumerate(lines):
            item = parse_line(line)
            if item is not None and item.number < taken.next:
                return True
            if item is not None:
                first = min(first, index)
        return taken.known_of(lines[:first]) > 0

    def take(self, lines: Sequence[str]) -> None:
        """Add new lines to the files.

        Args:
            lines: any piece of the node's log, the oldest line first; lines that were taken before
                are skipped. Split the log at line feeds only: `str.splitlines` also splits at other
                characters.

        Raises:
            ClusterJobError: the files cannot be written; they are unchanged.
        """
        if not lines:
            return
        try:
            private_dirs.make(self._directory)
            with self._locked():
                state = self._state()
                taken = state.attempts.setdefault(str(self._attempt), TakenLines())
                pages = _Pages(self._directory, state.sizes)
                before = asdict(taken)
                self._sort(lines, taken, pages=pages)
                if asdict(taken) != before:
                    pages.write()
                    files.write_json(self._directory / _STATE, asdict(state))
        except OSError as error:
            raise ClusterJobError(
                f"the log of node {self._node_rank} cannot be kept here: {error.strerror}: "
                f"{error.filename or self._directory}"
            ) from error

    def _sort(self, lines: Sequence[str], taken: TakenLines, pages: _Pages) -> None:
        items = _in_order(lines)
        first_bare = _first_new_bare(
            items,
            next(
                (
                    index
                    for index, (_, item) in enumerate(items)
                    if item is not None and item.number >= taken.next
                ),
                len(items),
            ),
            taken=taken,
        )
        for index, (line, item) in enumerate(items):
            if item is None:
                if index >= first_bare:
                    self._put_bare(line, taken, pages=pages)
            elif item.number >= taken.next:
                self._note_gap(item.number, taken, pages=pages)
                taken.next, taken.bare = item.number + 1, 0
                self._put(item, taken, pages=pages)
            elif taken.was_missing(item.number):
                self._put(item, taken, pages=pages)
        pages.note(taken.seconds)

    def _put(self, item: NumberedLine, taken: TakenLines, pages: _Pages) -> None:
        if item.seconds is not None and item.seconds > taken.seconds:
            pages.note(taken.seconds)
            taken.seconds = item.seconds
        if item.kind == "verdict":
            taken.add_verdict(item.text, complete=not item.more and self._node_rank == 0)
            return
        text, names = item.text, [AGENT_LOG]
        if item.kind != "agent":
            names = self._file_names(item.label, item.kind)
        elif AGENT_LOG not in taken.open:
            text = f"clusterjob: {text}"
        for name in names:
            pages.add(name, text if item.more else f"{text}\n")
            taken.mark(name, is_open=item.more)

    def _file_names(self, label: str, kind: str) -> list[str]:
        if (label, kind) not in self._names:
            pairs = [
                log_files.rank_files(self._directory, rank, restart=0, attempt=self._attempt)
                for rank in label_ranks(label)
            ]
            names = {pair[kind == "err"].name: None for pair in pairs}
            known = {name for one in self._names.values() for name in one}
            self._names[label, kind] = (
                list(names) if len(known | names.keys()) <= _MAX_FILES else [AGENT_LOG]
            )
        return self._names[label, kind]

    def _put_bare(self, line: str, taken: TakenLines, pages: _Pages) -> None:
        taken.remember(line)
        refused = parse_refusal(line)
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
        first, last, node = taken.next, number - 1, f"node {self._node_rank}"
        which = f"line {first} of {node} is"
        if first < last:
            which = f"lines {first} to {last} of {node} are"
        pages.add(AGENT_LOG, f"clusterjob: {which} missing in the platform's log\n")
        taken.missing = [*taken.missing, [first, last]][-_MAX_GAPS:]

    # -- the stored state --------------------------------------------------------------------------

    def _taken(self) -> TakenLines:
        return self._state().attempts.get(str(self._attempt), TakenLines())

    def _state(self) -> _State:
        try:
            return msgspec.convert(files.read_json(self._directory / _STATE), _State)
        except msgspec.ValidationError:
            return _State({}, {})  # there is no valid file: add all lines again

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self._directory / _LOCK, "ab", opener=_private) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _in_order(lines: Sequence[str]) -> list[tuple[str, NumberedLine | None]]:
    """Parse lines and sort the numbered lines; a log may show lines of one moment in any order."""
    items = [(line, parse_line(line)) for line in lines]
    numbered = iter(
        sorted((pair for pair in items if pair[1]), key=lambda pair: pair[1].number)  # type: ignore[union-attr]
    )
    return [next(numbered) if pair[1] else pair for pair in items]


def _first_new_bare(
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
        return first  # all lines of the piece are older than the newest known line
    follower = items[first][1] if first < len(items) else None
    if follower is not None and follower.number > taken.next and last is None:
        return run  # the lines follow a gap
    bare = [line for line, _ in items[run:first]]
    if last is None and follower is None and taken.is_older(bare):
        return first
    return run + taken.known_of(bare)


class _Pages:
    """The growing files of a node.

    The constructor truncates each file to the size in the stored state: a process that died may
    have added lines without storing the new size.
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
        for name in sorted(self._grown, key=log_files.by_start):
            self.add(
                TIMELINE,
                f"{seconds:.3f} {name} {self._sizes.get(name, 0) + len(self._added[name])}\n",
            )
        self._grown = {}

    def write(self) -> None:
        # Write the timeline last: it must not refer to bytes that are not written yet.
        for name in sorted(self._added, key=lambda name: name == TIMELINE):
            with open(self._directory / name, "ab", opener=_private) as file:
                file.write(self._added[name])
            self._sizes[name] = self._sizes.get(name, 0) + len(self._added[name])
