"""Read the samples of a node from its files, which `clusterjob.node.metrics.writer` writes.

`read` and `latest` return objects. `lines` and `times` return the decoded lines: a job of 256 ranks
and 24 hours has 50,000 samples with 800,000 values of workers and GPUs.

A line that is malformed, too long or cut is skipped. A job without metrics has no samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from clusterjob.node.logs.job_dir import THINNED
from clusterjob.node.logs.log_files import node_directory, open_regular
from clusterjob.node.metrics.samples import (
    Gpu,
    GpuSample,
    NodeFacts,
    Sample,
    WorkerSample,
    waiting_percent,
)
from clusterjob.node.metrics.segments import segment_numbers, segment_path

# Maximum bytes to read of a line, of `THINNED`, of a segment. A host may send any file: a short
# line counts as `_MIN_LINE` bytes, because the time to decode it does not depend on its length.
_MAX_LINE, _MAX_THINNED, _MAX_SEGMENT = 1 << 18, 64 << 20, 8 << 20
_MIN_LINE = 256
_MAX_TEXT = 200  # characters of a name in the facts
_TAIL = 1 << 16  # bytes at the end of a segment in which its last sample is searched
_NEWEST = 3  # segments in which a node's newest sample is searched
# msgspec raises the second one for values that are deeply nested.
_MALFORMED = (ValueError, RecursionError)

# Values that a newer version adds at the end of an array are ignored.
_Number = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
_Rank = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]


class TimesLine(msgspec.Struct, array_like=True, gc=False):
    """The two times of a sample; its other values are not decoded."""

    time: float
    monotonic: _Number


class WorkerLine(msgspec.Struct, array_like=True, gc=False):
    """A worker's rank, and the values of `WorkerSample`."""

    rank: _Rank
    cpu: _Number
    rss: _Count
    pss: _Count | None
    read: _Number
    written: _Number
    threads: _Count
    step: _Number | None = None  # older versions have none
    waited: _Number | None = None

    @property
    def waits(self) -> float | None:
        """The percent of its steps for which it waits in collectives; None if it is unknown."""
        return waiting_percent(self.step, self.waited)


class GpuLine(msgspec.Struct, array_like=True, gc=False):
    """The values of `GpuSample`."""

    use: _Number | None
    memory: _Count | None
    power: _Number | None
    temperature: _Number | None
    sm_clock: _Count | None
    memory_clock: _Count | None
    ecc: _Count | None
    xid: _Count | None


class SampleLine(TimesLine, array_like=True, gc=False):
    """The values of `Sample`."""

    restart: _Count
    quiet: float
    cpu: _Number
    memory: _Count
    load: _Number
    received: _Number
    sent: _Number
    read: _Number
    written: _Number
    workers: list[WorkerLine]
    gpus: list[GpuLine]


class _GpuFacts(msgspec.Struct, array_like=True):
    index: _Count
    uuid: str
    name: str
    memory: _Count


class _Facts(msgspec.Struct):
    node_rank: _Count
    host: str
    attempt: _Count
    cores: _Count
    memory: _Count
    gpus: list[_GpuFacts]


@dataclass(frozen=True)
class _Segment:
    """A segment that has at least one sample: its attempt, its first and last monotonic times."""

    attempt: int
    first: float
    last: float
    number: int
    path: Path


_T = TypeVar("_T")
_Decode = Callable[[bytes], _T]
_FACTS = msgspec.json.Decoder(_Facts)
_times = msgspec.json.Decoder(TimesLine).decode
_line = msgspec.json.Decoder(SampleLine).decode


def read(
    job_dir: Path, node_rank: int, since: float | None = None
) -> Iterator[tuple[NodeFacts, Sample]]:
    """Yield the samples of a node in order, each with the facts of its attempt.

    Where no segment is left, the thinned samples are yielded.

    Args:
        job_dir: the job's directory.
        node_rank: the node.
        since: yield only the samples of this many seconds before the node's newest sample, of its
            newest attempt; None for all. Jumps of the wall clock have no effect.
    """
    directory = node_directory(job_dir, node_rank)
    segments = _segments(directory)
    begin = (-1, 0.0)  # attempt and monotonic time
    with_thinned = True
    if since is not None:
        newest = _last(directory / THINNED, _times)
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
    for facts, sample in _merged(directory, segments, _sample, with_thinned=with_thinned):
        if (facts.attempt, sample.monotonic) >= begin:
            yield facts, sample


def latest(job_dir: Path, node_rank: int) -> tuple[NodeFacts, Sample] | None:
    """Return a node's newest sample; None without one. Reads only the end of the newest file."""
    directory = node_directory(job_dir, node_rank)
    for number in segment_numbers(directory)[: -_NEWEST - 1 : -1]:
        if (found := _last(segment_path(directory, number), _sample)) is not None:
            return found
    return _last(directory / THINNED, _sample)


def times(job_dir: Path, node_rank: int) -> Iterator[tuple[NodeFacts, TimesLine]]:
    """Yield the times of a node's samples in order, with their facts."""
    directory = node_directory(job_dir, node_rank)
    return _merged(directory, _segments(directory), _times)


def lines(
    job_dir: Path, node_rank: int, *, all_of: bool = True
) -> Iterator[tuple[NodeFacts, SampleLine]]:
    """Yield a node's samples in order, with their facts.

    Args:
        job_dir: the job's directory.
        node_rank: the node.
        all_of: whether to yield every sample that a segment has; else only the thinned ones, and
            those after the last thinned one.
    """
    directory = node_directory(job_dir, node_rank)
    segments = _segments(directory)
    if all_of:
        yield from _merged(directory, segments, _line)
        return
    ends: dict[int, float] = {}  # the last thinned time of each attempt
    for facts, sample in _samples(directory / THINNED, _line):
        yield facts, sample
        ends[facts.attempt] = sample.monotonic
    for each in segments:
        for facts, sample in _samples(each.path, _line):
            if sample.monotonic > ends.get(facts.attempt, float("-inf")):
                yield facts, sample


def parse(line: bytes) -> NodeFacts | Sample:
    """Return the facts or the sample of a line.

    Raises:
        ValueError: the line is malformed.
    """
    try:
        return _facts(line) if line.startswith(b"{") else _sample(line)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


# -- files -----------------------------------------------------------------------------------------


def _segments(directory: Path) -> list[_Segment]:
    """Return the segments of a node that have a sample, in order."""
    found = []
    for number in segment_numbers(directory):
        path = segment_path(directory, number)
        first, last = next(_samples(path, _times), None), _last(path, _times)
        if first is not None and last is not None:
            found.append(
                _Segment(first[0].attempt, first[1].monotonic, last[1].monotonic, number, path)
            )
    return sorted(found, key=lambda each: (each.attempt, each.first))


_AnyTimes = TypeVar("_AnyTimes", TimesLine, SampleLine, Sample)


def _merged(
    directory: Path,
    segments: list[_Segment],
    decode: _Decode[_AnyTimes],
    *,
    with_thinned: bool = True,
) -> Iterator[tuple[NodeFacts, _AnyTimes]]:
    """Yield the samples of segments, and thinned samples from times without a segment."""
    left = list(segments)
    for facts, sample in _samples(directory / THINNED, decode) if with_thinned else ():
        place = (facts.attempt, sample.monotonic)
        while left and (left[0].attempt, left[0].first) <= place:
            yield from _samples(left.pop(0).path, decode)
        if not any(
            each.attempt == facts.attempt and each.first <= sample.monotonic <= each.last
            for each in segments
        ):
            yield facts, sample
    for each in left:
        yield from _samples(each.path, decode)


def _samples(path: Path, decode: _Decode[_T]) -> Iterator[tuple[NodeFacts, _T]]:
    """Yield the valid samples of a file; none if it cannot be read."""
    facts: NodeFacts | None = None
    for line in _file_lines(path):
        with contextlib.suppress(*_MALFORMED):
            if line.startswith(b"{"):
                facts = _facts(line)
            elif facts is not None:
                yield facts, decode(line)


def _file_lines(path: Path, offset: int = 0) -> Iterator[bytes]:
    """Yield the lines of a file from the first line end after an offset; skip lines too long."""
    with contextlib.suppress(OSError), open_regular(path) as stream:
        stream.seek(offset)
        left = _MAX_THINNED if path.name == THINNED else _MAX_SEGMENT
        begin = offset == 0  # whether the next part is the begin of a line
        while left > 0 and (part := stream.readline(_MAX_LINE)):
            left -= max(len(part), _MIN_LINE)
            ended = part.endswith(b"\n")
            if begin and (ended or len(part) < _MAX_LINE):
                yield part
            begin = ended


def _last(path: Path, decode: _Decode[_T]) -> tuple[NodeFacts, _T] | None:
    """Return the last valid sample of a file, with the facts before it."""
    try:
        size = path.stat().st_size
    except OSError:
        return None
    last: tuple[NodeFacts, _T] | None = None
    if size <= _TAIL or path.name == THINNED:
        for last in _samples(path, decode):  # noqa: B007 - the last one
            pass
        return last
    first = next(_samples(path, decode), None)  # a segment belongs to one attempt
    if first is None:
        return None
    for line in _file_lines(path, size - _TAIL):
        with contextlib.suppress(*_MALFORMED):
            last = first[0], decode(line)
    return last or first


# -- lines -----------------------------------------------------------------------------------------


def _facts(line: bytes) -> NodeFacts:
    found = _FACTS.decode(line)
    return NodeFacts(
        found.node_rank,
        found.host[:_MAX_TEXT],
        attempt=found.attempt,
        cores=found.cores,
        memory=found.memory,
        gpus=tuple(
            Gpu(one.index, one.uuid[:_MAX_TEXT], name=one.name[:_MAX_TEXT], memory=one.memory)
            for one in found.gpus
        ),
    )


def _sample(line: bytes) -> Sample:
    values = msgspec.structs.asdict(_line(line))
    values["workers"] = {one.rank: _worker(one) for one in values["workers"]}
    values["gpus"] = tuple(map(_gpu, values["gpus"]))
    return Sample(**values)


def _worker(line: WorkerLine) -> WorkerSample:
    values = msgspec.structs.asdict(line)
    del values["rank"]
    return WorkerSample(**values)


def _gpu(line: GpuLine) -> GpuSample:
    return GpuSample(**msgspec.structs.asdict(line))
