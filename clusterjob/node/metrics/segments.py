"""Read the samples of a node from its files, which only grow.

In ``logs/node<k>/``:

- ``metrics.<n>``: a segment of half an hour with every sample. The newest segments are kept; an
  older one is removed as a whole.
- ``metrics.thinned``: one sample per minute for the whole job: rates are means, levels are peaks.

A segment begins with a line of the `NodeFacts`; in ``metrics.thinned`` each attempt does. Each
other line is a sample; see `clusterjob.node.metrics.lines`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clusterjob.node.logs.log_files import node_directory, open_regular
from clusterjob.node.metrics import lines
from clusterjob.node.metrics.samples import NodeFacts, Sample

THINNED = "metrics.thinned"
_SEGMENT = re.compile(r"metrics\.(\d{1,9})", re.ASCII)
_MAX_LINE, _MAX_FILE = 1 << 18, 64 << 20  # maximum bytes to read of a line, of a file
_TAIL = 1 << 16  # bytes at the end of a segment in which its last sample is searched


@dataclass(frozen=True)
class _Segment:
    """A segment that has at least one sample: its attempt, its first and last monotonic times."""

    attempt: int
    first: float
    last: float
    number: int
    path: Path


def read(
    job_dir: Path, node_rank: int, since: float | None = None
) -> Iterator[tuple[NodeFacts, Sample]]:
    """Yield the samples of a node in order, each with the facts of its attempt.

    A line that is malformed, too long or cut is skipped. A job without metrics has no samples.
    Where no segment is left, the thinned samples are yielded.

    Args:
        job_dir: the job's directory.
        node_rank: the node.
        since: yield only the samples of this many seconds before the node's newest sample, of its
            newest attempt; None for all. Jumps of the wall clock have no effect.
    """
    directory = node_directory(job_dir, node_rank)
    segments = sorted(_segments(directory), key=lambda each: (each.attempt, each.first))
    begin = (-1, 0.0)  # attempt and monotonic time
    with_thinned = True
    if since is not None:
        newest = _last(directory / THINNED)
        ends = [(each.attempt, each.last) for each in segments]
        ends += [(newest[0].attempt, newest[1].monotonic)] if newest else []
        if not ends:
            return
        attempt, last = max(ends)
        begin = (attempt, last - since)
        segments = [each for each in segments if (each.attempt, each.last) >= begin]
        numbers = [each.number for each in segments]
        whole = numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else False
        with_thinned = not (whole and (segments[0].attempt, segments[0].first) <= begin)
    for facts, sample in _merged(directory, segments, with_thinned=with_thinned):
        if (facts.attempt, sample.monotonic) >= begin:
            yield facts, sample


def latest(job_dir: Path, node_rank: int) -> tuple[NodeFacts, Sample] | None:
    """Return a node's newest sample; None without one. Reads only the end of the newest file."""
    directory = node_directory(job_dir, node_rank)
    for number in reversed(segment_numbers(directory)):
        if (found := _last(directory / f"metrics.{number}")) is not None:
            return found
    return _last(directory / THINNED)


def nodes(job_dir: Path) -> list[int]:
    """Return the ranks of the nodes that have a log directory in a job's directory."""
    try:
        names = os.listdir(node_directory(job_dir, 0).parent)
    except OSError:
        return []
    return sorted(int(name[4:]) for name in names if re.fullmatch(r"node[0-9]{1,9}", name))


def segment_numbers(directory: Path) -> list[int]:
    """Return the numbers of the segments in a node's log directory, ascending."""
    try:
        matches = map(_SEGMENT.fullmatch, os.listdir(directory))
    except OSError:
        return []
    return sorted(int(match[1]) for match in matches if match)


def _segments(directory: Path) -> Iterator[_Segment]:
    for number in segment_numbers(directory):
        path = directory / f"metrics.{number}"
        first, last = next(_samples(path), None), _last(path)
        if first is not None and last is not None:
            yield _Segment(
                first[0].attempt, first[1].monotonic, last[1].monotonic, number, path
            )  # fmt: skip


def _merged(
    directory: Path, segments: list[_Segment], *, with_thinned: bool
) -> Iterator[tuple[NodeFacts, Sample]]:
    """Yield the samples of segments, and thinned samples from times without a segment."""
    left = list(segments)
    for facts, sample in _samples(directory / THINNED) if with_thinned else ():
        place = (facts.attempt, sample.monotonic)
        while left and (left[0].attempt, left[0].first) <= place:
            yield from _samples(left.pop(0).path)
        if not any(
            each.attempt == facts.attempt and each.first <= sample.monotonic <= each.last
            for each in segments
        ):
            yield facts, sample
    for each in left:
        yield from _samples(each.path)


def _samples(path: Path) -> Iterator[tuple[NodeFacts, Sample]]:
    """Yield the valid samples of a file; none if it cannot be read."""
    facts: NodeFacts | None = None
    for line in _lines(path):
        with contextlib.suppress(ValueError):
            value = lines.parse(line)
            if isinstance(value, NodeFacts):
                facts = value
            elif facts is not None:
                yield facts, value


def _lines(path: Path, offset: int = 0) -> Iterator[bytes]:
    """Yield the lines of a file from the first line end after an offset; skip lines too long."""
    with contextlib.suppress(OSError), open_regular(path) as stream:
        stream.seek(offset)
        left, begin = _MAX_FILE, offset == 0  # begin: the next part is the begin of a line
        while left > 0 and (part := stream.readline(_MAX_LINE)):
            left -= len(part)
            ended = part.endswith(b"\n")
            if begin and (ended or len(part) < _MAX_LINE):
                yield part
            begin = ended


def _last(path: Path) -> tuple[NodeFacts, Sample] | None:
    """Return the last valid sample of a file, with the facts before it."""
    try:
        size = path.stat().st_size
    except OSError:
        return None
    last: tuple[NodeFacts, Sample] | None = None
    if size <= _TAIL or path.name == THINNED:
        for last in _samples(path):  # noqa: B007 - the last one
            pass
        return last
    first = next(_samples(path), None)  # a segment belongs to one attempt
    if first is None:
        return None
    for line in _lines(path, size - _TAIL):
        with contextlib.suppress(ValueError):
            value = lines.parse(line)
            last = (first[0], value) if isinstance(value, Sample) else last
    return last or first
