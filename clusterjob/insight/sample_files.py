"""Read the samples of a node from its file, which `clusterjob.node.metrics.sampler` writes.

`read` and `latest` return objects. `lines` and `times` return the decoded lines: a job of 256 ranks
and 24 hours has 170,000 samples with 2,700,000 rows of workers and GPUs.

A line that is malformed, too long or cut is skipped. A job without metrics has no samples.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from clusterjob.node.logs.job_dir import METRICS
from clusterjob.node.logs.log_files import node_directory, open_regular
from clusterjob.node.metrics.samples import (
    Gpu,
    GpuSample,
    NodeFacts,
    Sample,
    WorkerSample,
    waiting_percent,
)

# Maximum bytes to read of a line, and at the end of a file. A host may send any file: a short line
# counts as `_MIN_LINE` bytes, because the time to decode it does not depend on its length.
_MAX_LINE, _MAX_FILE = 1 << 18, 128 << 20
_MIN_LINE = 256
_MAX_TEXT = 200  # characters of a name in the facts
_TAIL = 1 << 20  # bytes at the end of a file in which its last sample is searched
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


_FACTS = msgspec.json.Decoder(_Facts)
_times = msgspec.json.Decoder(TimesLine).decode
_line = msgspec.json.Decoder(SampleLine).decode


def path_of(job_dir: Path, node_rank: int) -> Path:
    """Return the path of a node's samples."""
    return node_directory(job_dir, node_rank) / METRICS


def read(
    job_dir: Path, node_rank: int, since: float | None = None
) -> Iterator[tuple[NodeFacts, Sample]]:
    """Yield the samples of a node in order, each with the facts of its attempt.

    Args:
        job_dir: the job's directory.
        node_rank: the node.
        since: yield only the samples of this many seconds before the node's newest sample, of its
            newest attempt; None for all. Jumps of the wall clock have no effect.
    """
    newest = latest(job_dir, node_rank) if since is not None else None
    for facts, line in _lines(path_of(job_dir, node_rank)):
        with contextlib.suppress(*_MALFORMED):
            if newest is not None and since is not None:
                place = (facts.attempt, _times(line).monotonic)
                if place < (newest[0].attempt, newest[1].monotonic - since):
                    continue
            yield facts, _sample(line)


def latest(job_dir: Path, node_rank: int) -> tuple[NodeFacts, Sample] | None:
    """Return a node's newest sample; None without one. Reads only the end of the file."""
    found = None
    for facts, line in _lines(path_of(job_dir, node_rank), _TAIL):
        with contextlib.suppress(*_MALFORMED):
            found = facts, _line(line)
    return None if found is None else (found[0], _of_line(found[1]))


def times(job_dir: Path, node_rank: int) -> Iterator[tuple[NodeFacts, TimesLine]]:
    """Yield the times of a node's samples in order, with their facts."""
    for facts, line in _lines(path_of(job_dir, node_rank)):
        with contextlib.suppress(*_MALFORMED):
            yield facts, _times(line)


def lines(
    job_dir: Path, node_rank: int, gap: float = 0.0
) -> Iterator[tuple[NodeFacts, SampleLine]]:
    """Yield a node's samples in order, with their facts.

    Args:
        job_dir: the job's directory.
        node_rank: the node.
        gap: minimum seconds between two samples; those between them are left out.
    """
    last = (-1, 0.0)  # attempt and monotonic time
    for facts, line in _lines(path_of(job_dir, node_rank)):
        with contextlib.suppress(*_MALFORMED):
            place = (facts.attempt, _times(line).monotonic)
            if place[0] != last[0] or place[1] - last[1] >= gap:
                yield facts, _line(line)
                last = place


def parse(line: bytes) -> NodeFacts | Sample:
    """Return the facts or the sample of a line.

    Raises:
        ValueError: the line is malformed.
    """
    try:
        return _facts(line) if line.startswith(b"{") else _sample(line)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _lines(path: Path, limit: int = _MAX_FILE) -> Iterator[tuple[NodeFacts, bytes]]:
    """Yield the lines of samples at the end of a file, with the facts before them.

    Lines that are too long are left out.
    """
    facts: NodeFacts | None = None
    with contextlib.suppress(OSError), open_regular(path) as stream:
        begin = stream.seek(max(0, os.fstat(stream.fileno()).st_size - limit)) == 0
        left = limit
        while left > 0 and (part := stream.readline(_MAX_LINE)):
            left -= max(len(part), _MIN_LINE)
            whole, begin = begin and part.endswith(b"\n"), part.endswith(b"\n")
            if whole and part.startswith(b"{"):
                with contextlib.suppress(*_MALFORMED):
                    facts = _facts(part)
            elif whole and facts is not None:
                yield facts, part


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
    return _of_line(_line(line))


def _of_line(line: SampleLine) -> Sample:
    values = msgspec.structs.asdict(line)
    values["workers"] = {one.rank: _worker(one) for one in values["workers"]}
    values["gpus"] = tuple(map(_gpu, values["gpus"]))
    return Sample(**values)


def _worker(line: WorkerLine) -> WorkerSample:
    values = msgspec.structs.asdict(line)
    del values["rank"]
    return WorkerSample(**values)


def _gpu(line: GpuLine) -> GpuSample:
    return GpuSample(**msgspec.structs.asdict(line))
