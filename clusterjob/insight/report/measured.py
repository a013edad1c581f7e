"""Read the samples of all nodes into series over the job's time."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from clusterjob.insight import sample_files
from clusterjob.insight.report.series import COLUMNS, Series
from clusterjob.node.metrics.samples import NodeFacts, Sample

NODE = -1  # the number in the key of a value that belongs to the node
_LONG, _GAP = 3 * 3600.0, 60.0  # seconds of a job for which samples so far apart are enough
_LARGEST_GAP = 150.0  # seconds between two samples that are drawn as connected
_MAX_WORKERS, _MAX_GPUS = 512, 16  # of a node; the others are not shown
_MAX_SERIES = 4 * _MAX_WORKERS  # of a node, whose samples may name other workers each time

Key = tuple[str, int]  # a metric, and the rank or the GPU; `NODE` for the node


@dataclass
class NodeSamples:
    """The samples of one node in one attempt: where they lie, by the node's clock."""

    node: int
    attempt: int
    first: float
    last: float


@dataclass
class Measured:
    """The metrics of a job.

    Attributes:
        facts: the latest facts of each node.
        extents: the times of each node's samples in each attempt.
        series: the metrics of each node.
        gpu_errors: the latest XID and the ECC errors of each GPU with one, by node and GPU.
    """

    facts: dict[int, NodeFacts] = field(default_factory=dict)
    extents: list[NodeSamples] = field(default_factory=list)
    series: dict[int, dict[Key, Series]] = field(default_factory=dict)
    gpu_errors: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)

    def find(self, job_dir: Path, nodes: Iterable[int]) -> None:
        """Find the facts and the times of all samples."""
        for node in nodes:
            known: dict[int, NodeSamples] = {}
            for facts, sample in sample_files.times(job_dir, node):
                self.facts[node] = facts
                extent = known.setdefault(
                    facts.attempt,
                    NodeSamples(node, facts.attempt, first=sample.monotonic, last=sample.monotonic),
                )
                extent.first = min(extent.first, sample.monotonic)
                extent.last = max(extent.last, sample.monotonic)
            self.extents += known.values()

    def read(self, job_dir: Path, place: Callable[[int, int, float], float], end: float) -> None:
        """Read the samples of all nodes that `find` has found.

        Args:
            job_dir: the job's directory.
            place: returns a time on the job's axis for a node, an attempt and the node's time.
            end: the last time on the axis.
        """
        for node in sorted({extent.node for extent in self.extents}):
            longest = max(one.last - one.first for one in self.extents if one.node == node)
            samples = self._noting_errors(
                node, sample_files.read(job_dir, node, gap=_GAP if longest > _LONG else 0.0)
            )
            series = self.series.setdefault(node, {})
            for (first, last, keys), group in itertools.groupby(
                _placed(samples, functools.partial(place, node), end), key=lambda item: item[0]
            ):
                rows = [row for _, row in group]
                for key, values in zip(keys, zip(*rows, strict=True), strict=True):
                    if key not in series:
                        if len(series) >= _MAX_SERIES:
                            continue
                        series[key] = Series()
                    total, peak = sum(values), max(values)
                    for column in range(first, last + 1):
                        series[key].add(column, total, len(rows), peak)

    def _noting_errors(
        self, node: int, samples: Iterable[tuple[NodeFacts, Sample]]
    ) -> Iterator[tuple[NodeFacts, Sample]]:
        for facts, sample in samples:
            for index, gpu in enumerate(sample.gpus):
                if gpu.xid or gpu.ecc:
                    self.gpu_errors[node, index] = (gpu.xid or 0, gpu.ecc or 0)
            yield facts, sample


_Place = tuple[int, int, tuple[Key, ...]]


def _placed(
    samples: Iterable[tuple[NodeFacts, Sample]],
    place: Callable[[int, float], float],
    end: float,
) -> Iterator[tuple[_Place, list[float]]]:
    """Yield the columns and the keys of each sample, and its values in the order of the keys."""
    previous, attempt = float("-inf"), -1
    for facts, sample in samples:
        time = place(facts.attempt, sample.monotonic)
        last = min(COLUMNS - 1, max(0, int(time / end * COLUMNS)))
        first = last
        if facts.attempt == attempt and 0 < time - previous < _LARGEST_GAP:
            # A sample is about the time since the one before.
            first = min(last, int(previous / end * COLUMNS) + 1)
        previous, attempt = time, facts.attempt
        gpus = sample.gpus[:_MAX_GPUS]
        uses = [gpu.use for gpu in gpus if gpu.use is not None]
        memories = [gpu.memory for gpu in gpus if gpu.memory is not None]
        workers = sample.workers[:_MAX_WORKERS]
        waits = [sample_files.waits(worker) for worker in workers]
        keys = _keys(
            tuple([worker.rank for worker in workers]),
            tuple([gpu.use is not None for gpu in gpus]),
            tuple([gpu.memory is not None for gpu in gpus]),
            tuple([share is not None for share in waits]),
        )
        row = [
            sample.cpu,
            sample.memory,
            sample.received + sample.sent,
            sample.read + sample.written,
        ]
        if uses:
            row.append(sum(uses) / len(uses))
        if memories:
            row.append(sum(memories))
        row += uses
        row += memories
        for worker in workers:
            row += (worker.cpu, worker.rss, worker.read + worker.written)
        row += [share for share in waits if share is not None]
        yield (first, last, keys), row


@functools.lru_cache(maxsize=4096)
def _keys(
    ranks: tuple[int, ...],
    uses: tuple[bool, ...],
    memories: tuple[bool, ...],
    waits: tuple[bool, ...],
) -> tuple[Key, ...]:
    """Return the keys of a sample's values, in the order of `_placed`."""
    keys: list[Key] = [(name, NODE) for name in ("cpu", "memory", "network", "disk")]
    for name, known in (("gpu use", uses), ("gpu memory", memories)):
        keys += [(name, NODE)] if any(known) else []
    for name, known in (("gpu use", uses), ("gpu memory", memories)):
        keys += [(name, index) for index, is_known in enumerate(known) if is_known]
    for rank in ranks:
        keys += [("rank cpu", rank), ("rank memory", rank), ("rank disk", rank)]
    keys += [("rank waits", rank) for rank, known in zip(ranks, waits, strict=True) if known]
    return tuple(keys)
