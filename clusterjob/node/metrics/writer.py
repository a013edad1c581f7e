"""Append the samples of a node to its segments; see `clusterjob.node.metrics.segments`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from clusterjob.node.logs.job_dir import THINNED
from clusterjob.node.logs.log_files import node_directory
from clusterjob.node.metrics import lines, segments
from clusterjob.node.metrics.samples import GpuSample, NodeFacts, Sample, WorkerSample
from clusterjob.node.system.files import Appender

SEGMENT_SECONDS = 1800.0
_KEPT = 3  # number of segments
_EACH = 60.0  # seconds of one line in THINNED
_SEGMENT_BYTES, _THINNED_BYTES = 750_000, 90_000  # maximum bytes per hour
# Fields of which a mean is kept; of the others, the peak.
_MEANS = {
    "cpu", "load", "received", "sent", "read", "written", "use", "power", "step", "waited",
}  # fmt: skip
_CLOCKS = {"sm_clock", "memory_clock"}  # whole numbers, also as a mean


class BoundedFile:
    """Append samples to a file that grows by a limited number of bytes per hour.

    If lines are long, because the node has many workers, several samples become one line.

    Args:
        path: the file.
        each: minimum seconds of one line.
        limit: maximum bytes per hour.
    """

    def __init__(self, path: Path, each: float, limit: int) -> None:
        self._file = Appender(path)
        self._least = self._each = each
        self._limit = limit
        self._samples: list[Sample] = []
        self._written = float("-inf")  # the time of the last sample that was written

    def write(self, line: bytes) -> None:
        """Append a line; a full disk loses it."""
        with contextlib.suppress(OSError):
            self._file.write(line)

    def add(self, sample: Sample) -> None:
        """Add a sample, and write a line if the last line is old enough."""
        if self._samples and self._samples[-1].restart != sample.restart:
            self.flush()
        self._samples.append(sample)
        # Samples are not exactly as far apart as planned.
        if sample.monotonic - self._written >= 0.9 * self._each:
            self.flush()

    def flush(self) -> None:
        """Write the samples that were not written yet."""
        if self._samples:
            line = lines.sample_line(joined(self._samples))
            self._each = max(self._least, len(line) * 3600 / self._limit)
            self._written = self._samples[-1].monotonic
            self._samples = []
            self.write(line)


class SegmentWriter:
    """Append the samples of one attempt of a node.

    Args:
        job_dir: the job's directory.
        facts: the node.
        interval: seconds between two samples.
    """

    def __init__(self, job_dir: Path, facts: NodeFacts, interval: float) -> None:
        self._directory = node_directory(job_dir, facts.node_rank)
        self._header = lines.facts_line(facts)
        self._interval = interval
        self._segment: BoundedFile | None = None
        self._end = 0.0  # of the segment, by the monotonic clock
        self._thinned = BoundedFile(self._directory / THINNED, _EACH, limit=_THINNED_BYTES)
        self._thinned.write(self._header)

    def add(self, sample: Sample) -> None:
        """Append a sample."""
        if self._segment is None or sample.monotonic >= self._end:
            self._begin_segment(sample.monotonic)
        assert self._segment is not None
        self._segment.add(sample)
        self._thinned.add(sample)

    def close(self) -> None:
        """Write the last samples."""
        for file in (self._segment, self._thinned):
            if file is not None:
                file.flush()

    def _begin_segment(self, now: float) -> None:
        if self._segment is not None:
            self._segment.flush()
        numbers = segments.segment_numbers(self._directory)
        for number in numbers[: len(numbers) - _KEPT + 1]:
            with contextlib.suppress(OSError):
                segments.segment_path(self._directory, number).unlink()
        path = segments.segment_path(self._directory, numbers[-1] + 1 if numbers else 0)
        self._segment = BoundedFile(path, self._interval, limit=_SEGMENT_BYTES)
        self._segment.write(self._header)
        self._end = now + SEGMENT_SECONDS


def joined(samples: Sequence[Sample]) -> Sample:
    """Return one sample for several: the means of rates and the peaks of levels."""
    last = samples[-1]
    if len(samples) == 1:
        return last
    ranks = dict.fromkeys(rank for sample in samples for rank in sample.workers)
    workers = {
        rank: WorkerSample(
            **_joined([sample.workers[rank] for sample in samples if rank in sample.workers])
        )
        for rank in ranks
    }
    gpus = tuple(
        GpuSample(**_joined([sample.gpus[index] for sample in samples if index < len(sample.gpus)]))
        for index in range(len(last.gpus))
    )
    values = _joined(samples, leave=("time", "monotonic", "restart", "workers", "gpus"))
    return Sample(
        last.time, last.monotonic, last.restart, **values, workers=workers, gpus=gpus
    )  # fmt: skip


def _joined(samples: Sequence[Any], leave: Iterable[str] = ()) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name in vars(samples[0]):
        if name in leave:
            continue
        known = [value for sample in samples if (value := getattr(sample, name)) is not None]
        if not known:
            result[name] = None
        elif name in _MEANS:
            result[name] = fmean(known)
        elif name in _CLOCKS:
            result[name] = round(fmean(known))
        else:
            result[name] = max(known)
    return result
