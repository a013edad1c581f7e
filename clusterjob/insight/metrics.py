"""The metrics of a job: collect its nodes' samples, and explain those that are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec

from clusterjob.core import job_parts, polling
from clusterjob.core.records import Record
from clusterjob.errors import ClusterJobError
from clusterjob.insight import sample_files
from clusterjob.insight.sample_files import values
from clusterjob.node.metrics.samples import NodeFacts, Sample

_RECENT = 600.0  # seconds in which the newest sample of a rank is searched


@dataclass(frozen=True)
class Wanted:
    """The samples to show; None selects all.

    Attributes:
        nodes, ranks: the nodes and the workers; ranks leave out nodes without such a worker.
        since: seconds before each node's newest sample.
    """

    nodes: Sequence[int] | None = None
    ranks: Sequence[int] | None = None
    since: float | None = None


def collect(record: Record, wanted: Wanted, on_error: Callable[[str], None]) -> list[int]:
    """Copy a job's samples to this machine; return the nodes that have samples.

    Args:
        record: the job.
        wanted: the samples to show.
        on_error: called with one line for each node without samples, and if a host cannot be
            reached.

    Raises:
        UsageError: the job is an array, or it has no such node or rank.
        ClusterJobError: there is no sample.
    """
    job_parts.check_single(record, "metrics")
    job_parts.check_nodes(record, wanted.nodes)
    job_parts.check_ranks(record, wanted.ranks, job_parts.world_size(record))
    why = ""
    try:
        now = polling.status(record)
        why = "" if now.state.final else now.reason
        polling.collect(record)
    except ClusterJobError as error:  # show what was copied before
        why = error.message
    nodes = range(record.nodes) if wanted.nodes is None else wanted.nodes
    found = [node for node in nodes if sample_files.latest(record.job_dir, node) is not None]
    if not found:
        raise ClusterJobError(f"job {record.job_id} has no metrics: {why or _why_none(record)}")
    if why:
        on_error(why)
    for node in nodes:
        if node not in found:
            on_error(f"node {node} has no metrics: no samples of it have arrived")
    return found


def _why_none(record: Record) -> str:
    spec = record.spec
    if "metrics" not in spec:
        return "a version of clusterjob without metrics submitted it"
    if not spec["metrics"]:
        return "it was submitted with --no-metrics"
    if spec.get("launcher") == "srun":
        return "srun starts its workers without an agent"
    if not record.job_dir.is_dir():
        return f"its directory {record.job_dir} does not exist"
    if record.backend not in ("local", "ssh", "slurm"):
        return f"the {record.backend} backend receives only the logs of its jobs"
    return "the first sample is taken 5 s after the workers' start"


def samples(record: Record, node: int, wanted: Wanted) -> Iterator[tuple[NodeFacts, Sample]]:
    """Yield the wanted samples of a node, with the wanted ranks only."""
    for facts, sample in sample_files.read(record.job_dir, node, wanted.since):
        if wanted.ranks is None:
            yield facts, sample
        elif workers := [one for one in sample.workers if one.rank in wanted.ranks]:
            yield facts, msgspec.structs.replace(cast(Any, sample), workers=workers)


def latest(record: Record, node: int, wanted: Wanted) -> tuple[NodeFacts, Sample] | None:
    """Return a node's newest wanted sample; None without one."""
    newest = None
    for newest in samples(record, node, replace(wanted, since=_RECENT)):  # noqa: B007 - the last one
        pass
    return newest


def to_json(record: Record, nodes: Sequence[int], wanted: Wanted) -> dict[str, Any]:
    """Return the samples as plain data: one entry per node and attempt."""
    entries: list[dict[str, Any]] = []
    for node in nodes:
        last: NodeFacts | None = None
        for facts, sample in samples(record, node, wanted):
            if facts != last:
                last = facts
                entries.append({**vars(facts), "gpus": [vars(gpu) for gpu in facts.gpus]})
                entries[-1]["samples"] = []
            entries[-1]["samples"].append(_sample_json(facts, sample))
    return {"id": record.job_id, "nodes": entries}


def _sample_json(facts: NodeFacts, sample: Sample) -> dict[str, Any]:
    indices = [gpu.index for gpu in facts.gpus]
    return {
        **values(sample),
        "workers": [values(one) for one in sample.workers],
        "gpus": [
            {"index": index, **values(gpu)}
            for index, gpu in zip(indices, sample.gpus, strict=False)
        ],
    }  # fmt: skip


_ABOUT = ("time", "monotonic", "node", "host", "attempt", "restart", "kind", "index")
_VALUES = (
    "cpu", "memory", "read", "written", "threads", "received", "sent", "load", "quiet",
    "use", "power", "temperature", "sm_clock", "memory_clock", "ecc", "xid",
)  # fmt: skip
COLUMNS = (*_ABOUT, *_VALUES)


def rows(record: Record, nodes: Sequence[int], wanted: Wanted) -> Iterator[tuple[Any, ...]]:
    """Yield the samples as rows of `COLUMNS`: one per node, rank and GPU of each sample.

    The memory of a rank is its RSS. A value that is unknown is None. If ranks are selected, only
    their rows are yielded.
    """
    for node in nodes:
        for facts, sample in samples(record, node, wanted):
            begin = (sample.time, sample.monotonic, node, facts.host, facts.attempt, sample.restart)
            if wanted.ranks is None:
                yield (*begin, "node", node, *_row(values(sample)))
            for worker in sample.workers:
                row = {**values(worker), "memory": worker.rss}
                yield (*begin, "rank", worker.rank, *_row(row))
            for gpu, now in zip(facts.gpus, sample.gpus, strict=False) if not wanted.ranks else ():
                yield (*begin, "gpu", gpu.index, *_row(values(now)))


def _row(known: dict[str, Any]) -> list[Any]:
    return [known.get(name) for name in _VALUES]
