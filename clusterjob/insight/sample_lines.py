"""Read the lines of a node's samples fast, for all of a large job.

`clusterjob.node.metrics.segments` yields each sample as checked objects. A job of 256 ranks and 24
hours has 50,000 samples with 800,000 values of workers and GPUs, for which that takes ten times as
long as msgspec.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from clusterjob.node.logs.log_files import node_directory, open_regular
from clusterjob.node.metrics import lines, segments
from clusterjob.node.metrics.samples import NodeFacts

_MAX_LINE, _MAX_FILE = 1 << 18, 64 << 20  # bytes to read of a line, of a file

# Lines of `clusterjob.node.metrics.lines`: values in the order of `Sample`, `WorkerSample` and
# `GpuSample`. Values that follow are ignored.
_Number = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
_Rank = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]


class Times(msgspec.Struct, array_like=True, gc=False):
    """The two times of a sample; its other values are not read."""

    time: float
    monotonic: _Number


class Worker(msgspec.Struct, array_like=True, gc=False):
    """The values of a worker."""

    rank: _Rank
    cpu: _Number
    rss: _Number
    pss: _Number | None
    read: _Number
    written: _Number


class Gpu(msgspec.Struct, array_like=True, gc=False):
    """The values of a GPU."""

    use: _Number | None
    memory: _Number | None
    power: _Number | None
    temperature: _Number | None
    sm_clock: _Number | None
    memory_clock: _Number | None
    ecc: _Number | None
    xid: _Number | None


class Sample(Times, array_like=True, gc=False):
    """The values of a node, its workers and its GPUs."""

    restart: int
    quiet: float
    cpu: _Number
    memory: _Number
    load: _Number
    received: _Number
    sent: _Number
    read: _Number
    written: _Number
    workers: list[Worker]
    gpus: list[Gpu]


_TIMES, _SAMPLES = msgspec.json.Decoder(Times), msgspec.json.Decoder(Sample)


def times(job_dir: Path, node: int) -> Iterator[tuple[NodeFacts, Times]]:
    """Yield the times of a node's samples with their facts."""
    return _read(job_dir, node, _TIMES, with_segments=True)


def samples(
    job_dir: Path, node: int, *, with_segments: bool = True
) -> Iterator[tuple[NodeFacts, Sample]]:
    """Yield a node's samples with their facts, in order; malformed lines are skipped.

    Args:
        job_dir: the job's directory.
        node: the node.
        with_segments: whether to read every sample, where it still exists; else the samples that
            are one minute apart.
    """
    return _read(job_dir, node, _SAMPLES, with_segments=with_segments)


def _read(
    job_dir: Path, node: int, decoder: msgspec.json.Decoder[Any], *, with_segments: bool
) -> Iterator[tuple[NodeFacts, Any]]:
    """Yield a node's samples with their facts; malformed lines are skipped.

    The thinned samples of a time that a segment covers are left out.

    Args:
        job_dir: the job's directory.
        node: the node.
        decoder: makes a sample of a line.
        with_segments: whether to read the segments too, where they exist.
    """
    directory = node_directory(job_dir, node)
    ends: dict[int, float] = {}  # the last thinned time of each attempt
    begins: dict[int, float] = {}  # the first time of a segment
    parts = [directory / f"metrics.{number}" for number in segments.segment_numbers(directory)]
    if with_segments:
        for path in parts:
            first = next(_samples(path, _TIMES), None)
            if first is not None:
                begins.setdefault(first[0].attempt, first[1].monotonic)
    for facts, sample in _samples(directory / segments.THINNED, decoder):
        if sample.monotonic < begins.get(facts.attempt, float("inf")):
            yield facts, sample
        ends[facts.attempt] = sample.monotonic
    for path in parts:
        for facts, sample in _samples(path, decoder):
            if with_segments or sample.monotonic > ends.get(facts.attempt, float("-inf")):
                yield facts, sample


def _samples(path: Path, decoder: msgspec.json.Decoder[Any]) -> Iterator[tuple[NodeFacts, Any]]:
    facts: NodeFacts | None = None
    with contextlib.suppress(OSError), open_regular(path) as stream:
        left = _MAX_FILE
        while left > 0 and (line := stream.readline(_MAX_LINE)):
            left -= len(line)
            if line.startswith(b"{"):
                with contextlib.suppress(ValueError):
                    found = lines.parse(line)
                    facts = found if isinstance(found, NodeFacts) else facts
            elif facts is not None:
                with contextlib.suppress(msgspec.MsgspecError, ValueError):
                    yield facts, decoder.decode(line)
