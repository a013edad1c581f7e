"""The newest output of each rank of a node, while its files grow."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from clusterjob.node.logs.job_dir import TIMELINE
from clusterjob.node.logs.log_files import (
    FILE_NAME,
    NOTE,
    LogFile,
    by_start,
    file_names,
    last_lines,
)
from clusterjob.node.system.sanitize import sanitize

_FIRST_NOTES = 8192  # records of a long timeline that the first call reads
_LINE_TAIL = 4096  # bytes to read for the last line of a file
_LONGEST = 500  # first characters of a line that are kept
_MAX_RANKS = 4096  # ranks of one node; a host may name any number


class LiveOutput:
    """The newest output of each rank: when it came, by the node's clock, and its last line.

    The time is the one that the agent has recorded in the timeline. So it is known at once, also
    for files that were copied from another machine a moment ago.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._timeline = LogFile(0, -1, stream="", path=directory / TIMELINE)
        self._begin = 0.0  # the first recorded time that was read
        self._seen: dict[str, tuple[float, int]] = {}  # by name: time and size
        self._shown: dict[int, tuple[str, int]] = {}  # by rank: the file and size of a line
        self._lines: dict[int, str] = {}
        self.newest: dict[int, float] = {}  # by rank

    def read(self) -> float:
        """Read what was added; return the node's time now, as far as the timeline tells it."""
        last = self._begin
        for seconds, name, size in self._notes():
            self._begin = self._begin or seconds
            self._seen[name] = (seconds, size)
            last = max(last, seconds)
        self._find_unrecorded()
        files: dict[int, list[str]] = defaultdict(list)
        for name in self._seen:
            match = FILE_NAME.fullmatch(name)
            if match is not None:
                files[int(match["rank"])].append(name)
        for rank, names in list(files.items())[:_MAX_RANKS]:
            start = max(by_start(name)[:2] for name in names)
            name = max(
                (name for name in names if by_start(name)[:2] == start),
                # Of files that grew at once, stderr: it may have the reason of what follows.
                key=lambda name: (self._seen[name][0], name.endswith(".err"), name),
            )
            self.newest[rank], size = self._seen[name]
            if self._shown.get(rank) != (name, size):
                self._shown[rank] = (name, size)
                if found := last_lines(self._directory / name, 1, limit=_LINE_TAIL):
                    self._lines[rank] = sanitize(found[0].strip()[:_LONGEST])
        with contextlib.suppress(OSError):
            # Both times are of this machine: when the last record was written, or copied, here.
            age = time.time() - (self._directory / TIMELINE).stat().st_mtime
            last = max([last, *(seconds for seconds, _ in self._seen.values())])
            return last + max(0.0, age) if last else 0.0
        return time.time() if self._seen else 0.0

    def line(self, rank: int) -> str:
        """Return the last line of a rank."""
        return self._lines.get(rank, "")

    def _notes(self) -> Iterator[tuple[float, str, int]]:
        """Yield the records of the timeline that are new; at first of many, the last ones."""
        if not self._timeline.offset:
            self._timeline.skip_to_tail(_FIRST_NOTES)
        for line in itertools.chain.from_iterable(self._timeline.lines_up_to(None)):
            if (match := NOTE.fullmatch(line.text)) is not None:
                yield float(match[1]), match[2], int(match[3])

    def _find_unrecorded(self) -> None:
        """Add the files that no record names: old ones, or all if the node has no agent."""
        has_timeline = self._timeline.offset > 0
        if has_timeline and self._shown:
            return  # what grows from now on is recorded
        for name in file_names(self._directory):
            if FILE_NAME.fullmatch(name) and (not has_timeline or name not in self._seen):
                with contextlib.suppress(OSError):
                    found = (self._directory / name).stat()
                    seconds = self._begin if has_timeline else found.st_mtime
                    if found.st_size:
                        self._seen[name] = (seconds, found.st_size)
