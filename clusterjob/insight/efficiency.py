"""How well a job used what it held: from its nodes' end records, or else from their samples.

`efficiency` returns these keys; a value that is unknown is None:

All attempts of a job that was queued again are summed, as far as their agents wrote their ends.

- ``attempts``: the number of attempts.
- ``wall_seconds``: from the start of the first agent of an attempt to the end of its last.
- ``startup_seconds``: until the workers of all nodes ran.
- ``gpu_hours_held``, ``gpu_hours_idle``: idle is a use below 5 %, and the time before the workers
  were started.
- ``restarts``, ``restart_seconds``: from the end of a worker until the workers ran again. The work
  that was done since the last checkpoint is lost too; nobody knows how much that is.
- ``nodes``: per node ``node_rank``, ``host``, ``cores``, ``cpu_mean`` and ``cpu_peak`` (cores that
  the workers used), ``memory``, ``memory_mean`` and ``memory_peak`` (bytes; the sum of the workers'
  RSS, which counts shared pages once per worker), ``gpus``, ``gpu_mean`` and ``gpu_peak``
  (percent), and ``gpu_memory_peak`` (bytes of one GPU).
- ``slowest_rank``: ``rank``, ``node_rank``, ``host``, ``measure``, and the ``seconds`` and
  ``percent`` above the median rank; None if the ranks are even. The measure is the ``run time`` of
  the last round if one rank of a job that succeeded ran clearly longer, else the ``CPU time``:
  while ranks wait for a slow one in a collective, they need none.
- ``advice``: a list of texts.

Durations are of each node's monotonic clock.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Annotated, Any

import msgspec

from clusterjob.core.records import Record
from clusterjob.insight import sample_files
from clusterjob.node.logs import ends
from clusterjob.node.metrics.samples import IDLE, NodeFacts, Sample, Usage
from clusterjob.node.verdict import JobState

_ENOUGH = 10.0  # seconds of samples without which there is no advice
_ROOM = 1.25  # an advised limit is this many times the peak
_WASTE = 0.6  # advise a smaller limit if it is below this share of the current one
_GPUS_IDLE = 0.5  # advise if the GPUs were idle for a larger share of the time
_LONGER = (2.0, 0.02)  # a rank is slow if it is above the median by both: seconds, share
_BUSIER = (2.0, 0.05)
_GIB = 1 << 30
_LEAST = 0.05  # seconds; nodes round to 0.1 s, and a smaller divisor would give infinity
_RANK = re.compile(r"\d{1,9}", re.ASCII)
_Number = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]


class _GpuUsage(msgspec.Struct):
    """The use of one GPU, as `clusterjob.node.metrics.samples` sums it up."""

    seconds: _Number
    idle: _Number
    mean: _Number | None
    peak: _Number | None
    memory: _Number


class _NodeUsage(msgspec.Struct):
    """The usage of a node in its end record; without samples, only its durations."""

    wall: _Number
    attempts: _Count = 1
    visible_gpus: _Count = 0  # counted without the driver's library
    waited: _Number = 0.0
    startup: _Number | None = None
    restarts: _Count = 0
    restart_seconds: _Number = 0.0
    ran: dict[str, _Number] = {}
    host: str = ""
    cores: _Count = 0
    memory: _Count = 0
    seconds: _Number = 0.0
    cpu_seconds: _Number = 0.0
    cpu_peak: _Number = 0.0
    memory_mean: _Number = 0.0
    memory_peak: _Number = 0.0
    machine_peak: _Number = 0.0
    ranks: dict[str, list[_Number]] = {}
    gpus: list[_GpuUsage] = []


def efficiency(
    record: Record, *, live: bool = False, elapsed: float | None = None
) -> dict[str, Any] | None:
    """Return how well a job used its resources; None if it has no usage yet.

    Args:
        record: the job, or an element of an array.
        live: whether to read the samples of nodes that have not ended, which takes longer.
        elapsed: seconds for which the attempt has run; the samples end earlier.
    """
    usages = _usages(record, live=live or record.end is not None, elapsed=elapsed or 0.0)
    return _of_usages(record, usages) if usages else None


def _of_usages(record: Record, usages: dict[int, _NodeUsage]) -> dict[str, Any]:
    nodes = [_node(rank, usage) for rank, usage in usages.items() if usage.seconds > _LEAST]
    startups = [usage.startup for usage in usages.values() if usage.startup is not None]
    held = sum(max(len(usage.gpus), usage.visible_gpus) * usage.wall for usage in usages.values())
    idle = sum(
        min(usage.wall, gpu.idle + usage.waited) for usage in usages.values() for gpu in usage.gpus
    )
    known = any(gpu.mean is not None for usage in usages.values() for gpu in usage.gpus)
    return {
        "attempts": max(usage.attempts for usage in usages.values()),
        "wall_seconds": max(usage.wall for usage in usages.values()),
        "startup_seconds": max(startups, default=None),
        "gpu_hours_held": round(held / 3600, 3),
        "gpu_hours_idle": round(idle / 3600, 3) if known or not held else None,
        "restarts": max(usage.restarts for usage in usages.values()),
        "restart_seconds": max(usage.restart_seconds for usage in usages.values()),
        "nodes": nodes,
        "slowest_rank": _slowest(record, usages),
        "advice": _advice(record, list(usages.values())),
    }


def total(records: Sequence[Record], *, live: bool = False) -> dict[str, Any] | None:
    """Return the sums of several jobs, such as an array's elements; None if none has a usage.

    ``jobs`` is the number of jobs with a usage. There are no nodes; ``cores``, ``cpu_mean``,
    ``cpu_peak``, ``memory_peak``, ``gpu_mean``, ``gpu_peak`` and ``gpu_memory_peak`` are those over
    all nodes.
    """
    used = [(one, _usages(one, live=live or one.end is not None)) for one in records]
    used = [(one, usages) for one, usages in used if usages]
    if not used:
        return None
    known = [_of_usages(one, usages) for one, usages in used]
    summed = ("wall_seconds", "startup_seconds", "gpu_hours_held", "gpu_hours_idle", "restarts")
    sums: dict[str, Any] = {
        name: round(sum(job[name] or 0 for job in known), 3)
        for name in (*summed, "restart_seconds")
    }
    if all(job["gpu_hours_idle"] is None for job in known):
        sums["gpu_hours_idle"] = None
    advice = _advice(used[0][0], [usage for _, usages in used for usage in usages.values()])
    nodes = [(job["wall_seconds"], node) for job in known for node in job["nodes"]]
    return {"jobs": len(known), **sums, **_over_nodes(nodes), "advice": advice}


def averages(found: dict[str, Any]) -> dict[str, Any]:
    """Return the mean and peak use over all nodes of one job."""
    return _over_nodes([(1.0, node) for node in found["nodes"]])


def _over_nodes(nodes: Sequence[tuple[float, dict[str, Any]]]) -> dict[str, Any]:
    """Return the means, weighted by time, and the peaks of nodes."""

    def mean(name: str) -> float | None:
        values = [(weight, one[name]) for weight, one in nodes if one[name] is not None]
        weights = sum(weight for weight, _ in values)
        return round(sum(w * value for w, value in values) / weights, 2) if weights else None

    def peak(name: str) -> Any:
        return max((one[name] for _, one in nodes if one[name] is not None), default=None)

    return {
        "cores": mean("cores"),
        "cpu_mean": mean("cpu_mean"),
        "cpu_peak": peak("cpu_peak"),
        "memory_peak": peak("memory_peak"),
        "gpu_mean": mean("gpu_mean"),
        "gpu_peak": peak("gpu_peak"),
        "gpu_memory_peak": peak("gpu_memory_peak"),
    }


# -- the nodes' usage ------------------------------------------------------------------------------


def _usages(record: Record, *, live: bool, elapsed: float = 0.0) -> dict[int, _NodeUsage]:
    """Return the usage of each node, from its end record, else from its samples."""
    written = ends.written(record.job_dir, None)
    attempts = [end["attempt"] for end in written]  # a verdict of Slurm's has no attempt
    if record.verdict is not None:
        attempts.append(record.verdict.attempt)
    elif (newest := sample_files.latest(record.job_dir, 0)) is not None:
        attempts.append(newest[0].attempt)
    kept: dict[int, list[Any]] = {}
    ended = set()
    for end in written:
        kept.setdefault(end["node_rank"], []).append(end.get("usage"))
        if end["attempt"] == max(attempts) and end.get("usage") is not None:
            ended.add(end["node_rank"])
    found: dict[int, _NodeUsage] = {}
    for node in range(record.nodes):
        own = kept.get(node, [])
        sums = (
            None
            if node in ended or not live
            else of_samples(sample_files.read(record.job_dir, node))
        )
        if sums is not None:
            own.append(sums | {"wall": max(sums["wall"], round(elapsed, 1))})
        for usage in own:
            if usage is not None:
                # Another version, or a host that is not to be trusted.
                with contextlib.suppress(msgspec.ValidationError, ValueError, RecursionError):
                    made = msgspec.convert(usage, _NodeUsage)
                    found[node] = _sum(found[node], made) if node in found else made
    return found


def of_samples(samples: Iterable[tuple[NodeFacts, Sample]]) -> dict[str, Any] | None:
    """Return the sums of the newest attempt of a node that left no end record; None without one."""
    usage: Usage | None = None
    attempt = first = last = 0.0
    for facts, sample in samples:
        if usage is None or facts.attempt != attempt:
            usage, attempt, first = Usage(), facts.attempt, sample.monotonic
        usage.add(facts, sample)
        last = sample.monotonic
    sums = None if usage is None else usage.to_json()
    return None if sums is None else sums | {"wall": round(last - first, 1)}


def _sum(one: _NodeUsage, two: _NodeUsage) -> _NodeUsage:
    """Return the usage of a node in two attempts; ranks and host are those of the second."""
    added = ("wall", "waited", "restarts", "restart_seconds", "seconds", "cpu_seconds", "attempts")
    peaks = ("visible_gpus", "cpu_peak", "memory_peak", "machine_peak")
    gpus = [_sum_gpu(*pair) for pair in zip(one.gpus, two.gpus, strict=False)]
    longer = max(one.gpus, two.gpus, key=len)
    return msgspec.structs.replace(
        two if two.seconds else msgspec.structs.replace(one, ran=two.ran),
        startup=None
        if one.startup is None and two.startup is None
        else (one.startup or 0.0) + (two.startup or 0.0),
        memory_mean=_mean(one.memory_mean, two.memory_mean, (one.seconds, two.seconds)) or 0.0,
        gpus=gpus + longer[len(gpus) :],
        **{name: getattr(one, name) + getattr(two, name) for name in added},
        **{name: max(getattr(one, name), getattr(two, name)) for name in peaks},
    )


def _sum_gpu(one: _GpuUsage, two: _GpuUsage) -> _GpuUsage:
    return _GpuUsage(
        one.seconds + two.seconds,
        one.idle + two.idle,
        _mean(one.mean, two.mean, (one.seconds, two.seconds)),
        max((peak for peak in (one.peak, two.peak) if peak is not None), default=None),
        max(one.memory, two.memory),
    )


def _mean(one: float | None, two: float | None, weights: tuple[float, float]) -> float | None:
    """Return the weighted mean of two values, of which one may be unknown."""
    known = [(v, w) for v, w in zip((one, two), weights, strict=True) if v is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def _node(rank: int, usage: _NodeUsage) -> dict[str, Any]:
    means = [gpu.mean for gpu in usage.gpus if gpu.mean is not None]
    peaks = [gpu.peak for gpu in usage.gpus if gpu.peak is not None]
    return {
        "node_rank": rank,
        "host": usage.host[:200],
        "cores": usage.cores,
        "cpu_mean": round(usage.cpu_seconds / usage.seconds, 2),
        "cpu_peak": usage.cpu_peak,
        "memory": usage.memory,
        "memory_mean": int(usage.memory_mean),
        "memory_peak": int(usage.memory_peak),
        "gpus": len(usage.gpus),
        "gpu_mean": round(sum(means) / len(means), 1) if means else None,
        "gpu_peak": max(peaks, default=None),
        "gpu_memory_peak": max((int(gpu.memory) for gpu in usage.gpus), default=None),
    }


def _slowest(record: Record, usages: dict[int, _NodeUsage]) -> dict[str, Any] | None:
    ran: dict[tuple[int, str], float] = {}  # by node and rank
    cpu: dict[tuple[int, str], float] = {}
    for node, usage in usages.items():
        ran |= {(node, rank): seconds for rank, seconds in usage.ran.items()}
        cpu |= {(node, rank): sums[0] for rank, sums in usage.ranks.items() if sums}
    succeeded = record.verdict is not None and record.verdict.state is JobState.SUCCEEDED
    measures = [("run time", ran, _LONGER)] if succeeded else []
    for measure, values, (seconds, share) in [*measures, ("CPU time", cpu, _BUSIER)]:
        if len(values) < 2:
            continue
        (node, rank), most = max(values.items(), key=lambda item: item[1])
        middle = median(values.values())
        if most - middle >= max(seconds, share * middle) and _RANK.fullmatch(rank):
            return {
                "rank": int(rank),
                "node_rank": node,
                "host": usages[node].host[:200],
                "measure": measure,
                "seconds": round(most - middle, 1),
                "percent": round(100 * (most - middle) / middle, 1) if middle > _LEAST else None,
            }
    return None


# -- advice ----------------------------------------------------------------------------------------


def _advice(record: Record, usages: Sequence[_NodeUsage]) -> list[str]:
    usages = [usage for usage in usages if usage.seconds >= _ENOUGH]
    if not usages:
        return []
    texts = [
        _memory_advice(record, usages),
        _core_advice(record, usages),
        *_gpu_advice(usages),
    ]
    return [text for text in texts if text]


def _memory_advice(record: Record, usages: Sequence[_NodeUsage]) -> str:
    resources = record.spec.get("resources")
    asked = resources.get("mem") if isinstance(resources, dict) else None
    if not isinstance(asked, int) or asked <= 0:
        return ""
    # If the cluster limits the job's control group, that is the memory that counts.
    peak = max(
        max(use.memory_peak, use.machine_peak if use.memory <= asked * 1.01 else 0)
        for use in usages
    )
    wanted = math.ceil(peak * _ROOM / _GIB) * _GIB
    if wanted < asked * _WASTE:
        return f"asked {_gib(asked)}, peak {_gib(peak)}: try --mem {wanted // _GIB}G"
    if peak > asked * 0.95:
        return f"asked {_gib(asked)}, peak {_gib(peak)}: little room is left"
    return ""


def _gib(size: float) -> str:
    return f"{size / _GIB:.3g}G" if size >= _GIB else f"{size / (1 << 20):.0f}M"


def _core_advice(record: Record, usages: Sequence[_NodeUsage]) -> str:
    """Advise fewer cores per worker if the job asked for a number."""
    resources = record.spec.get("resources")
    asked = resources.get("cpus_per_task") if isinstance(resources, dict) else None
    workers = max(len(usage.ranks) for usage in usages)
    if not isinstance(asked, int) or asked < 2 or not workers:
        return ""
    peak = max(usage.cpu_peak for usage in usages) / workers
    wanted = max(1, math.ceil(peak * _ROOM))
    if wanted < asked * _WASTE:
        return f"asked {asked} cores per worker, peak {peak:.1f}: try --cpus-per-task {wanted}"
    return ""


def _gpu_advice(usages: Sequence[_NodeUsage]) -> list[str]:
    known = [[gpu for gpu in usage.gpus if gpu.mean is not None] for usage in usages]
    unused = [sum((gpu.peak or 0) < IDLE for gpu in gpus) for gpus in known]
    if unused and min(unused) > 0:
        count = min(len(gpus) for gpus in known)
        left = max(len(gpus) for gpus in known) - min(unused)
        hint = f": try --gpus {left}" if left else ""
        return [f"{min(unused)} of {count} GPUs of each node were never used{hint}"]
    seconds = sum(gpu.seconds for gpus in known for gpu in gpus)
    idle = sum(gpu.idle for gpus in known for gpu in gpus)
    if seconds > _LEAST and idle / seconds > _GPUS_IDLE:
        return [f"the GPUs were idle {100 * idle / seconds:.0f}% of the time"]
    return []
