"""The samples of a node: one table of values for sampler, file, Prometheus and readers.

A node writes ``logs/node<k>/metrics.jsonl``. An object has the `NodeFacts`, and an array a sample
of the node in the last object: the values of `Sample` in their order, with an array for each
worker, which begins with its rank, and for each GPU. `clusterjob.insight.sample_files` reads it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from statistics import fmean
from typing import Any, TypeVar

IDLE = 5.0  # percent: a GPU with less use counts as idle
_LONGEST = 130.0  # seconds between two samples that are not a gap


@dataclass(frozen=True)
class Column:
    """How a value is kept and shown.

    Attributes:
        join: returns one value for those of several samples.
        family: name of the Prometheus family, without ``clusterjob_``; one with the suffix
            ``_total`` is a counter. Empty for none.
        help: what the family is.
        scale: factor from the value to the unit of Prometheus.
        total: whether the value is a rate whose sum over the time is shown.
    """

    join: Callable[[Sequence[Any]], Any]
    family: str = ""
    help: str = ""
    scale: float = 1.0
    total: bool = False


def _last(values: Sequence[Any]) -> Any:
    return values[-1]


def _column(
    join: Callable[[Any], Any],
    family: str = "",
    text: str = "",
    default: Any = MISSING,
    **more: Any,
) -> Any:  # a field of a dataclass
    return field(default=default, metadata={"column": Column(join, family, text, **more)})


_gpu_column = functools.partial(_column, default=None)


@dataclass(frozen=True)
class WorkerSample:
    """What one worker, with the processes below it, used since the last sample.

    Attributes:
        cpu: percent of one core.
        rss: resident memory, bytes.
        pss: proportional share of the memory, bytes, as it was read the last time; None before.
        read, written: bytes per second from and to disks.
        threads: number of threads.
        step: the mean length of its last steps, milliseconds; None if it is unknown.
        waited: its mean wait in collectives in a step, milliseconds.
    """

    cpu: float = _column(
        fmean, "worker_cpu_seconds_total", "CPU time of the rank's processes.", scale=0.01,
        total=True,
    )  # fmt: skip
    rss: int = _column(max, "worker_resident_memory_bytes", "Resident memory.")
    pss: int | None = _column(
        max, "worker_proportional_memory_bytes", "Proportional share of the memory."
    )
    read: float = _column(
        fmean, "worker_disk_read_bytes_total", "Bytes read by the rank.", total=True
    )
    written: float = _column(
        fmean, "worker_disk_written_bytes_total", "Bytes written by the rank.", total=True
    )
    threads: int = _column(max, "worker_threads", "Threads.")
    step: float | None = _column(fmean, default=None)
    waited: float | None = _column(fmean, default=None)

    @property
    def waits(self) -> float | None:
        """The percent of its steps for which it waits in collectives; None if it is unknown."""
        return waiting_percent(self.step, self.waited)


def waiting_percent(step: float | None, waited: float | None) -> float | None:
    """Return the percent of a step of this length that a wait takes; None if it is unknown."""
    return None if not step or waited is None else min(100.0, 100 * waited / step)


@dataclass(frozen=True)
class GpuSample:
    """The state of one GPU; None for each value that the driver does not give.

    Attributes:
        use: percent of the time in which a kernel ran.
        memory: bytes in use.
        power: watts.
        temperature: degrees Celsius.
        sm_clock, memory_clock: MHz.
        ecc: uncorrected ECC errors since the driver was loaded.
        xid: the latest XID error code since the start of the job; 0 for none.
    """

    use: float | None = _gpu_column(
        fmean, "gpu_utilization_ratio", "Share of the time in which a kernel ran.", scale=0.01
    )
    memory: int | None = _gpu_column(max, "gpu_memory_used_bytes", "Memory in use.")
    power: float | None = _gpu_column(fmean, "gpu_power_watts", "Power.")
    temperature: float | None = _gpu_column(max, "gpu_temperature_celsius", "Temperature.")
    sm_clock: int | None = _gpu_column(
        fmean, "gpu_sm_clock_hertz", "Clock of the multiprocessors.", scale=10**6
    )
    memory_clock: int | None = _gpu_column(
        fmean, "gpu_memory_clock_hertz", "Clock of the memory.", scale=10**6
    )
    ecc: int | None = _gpu_column(
        max, "gpu_ecc_uncorrected_errors_total", "Uncorrected ECC errors since the driver load."
    )
    xid: int | None = _gpu_column(_last, "gpu_last_xid", "The last XID error code; 0 for none.")


@dataclass(frozen=True)
class Gpu:
    """A GPU of a node: its index, its UUID, its name and its memory in bytes."""

    index: int
    uuid: str
    name: str
    memory: int


@dataclass(frozen=True)
class NodeFacts:
    """What does not change during an attempt.

    Attributes:
        node_rank, host: the node.
        attempt: the number of the job's attempt.
        cores: the cores that the job may use.
        memory: bytes of memory that the job may use.
        gpus: the GPUs that the job may use.
    """

    node_rank: int
    host: str
    attempt: int
    cores: int
    memory: int
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One sample of a node.

    Attributes:
        time: seconds since the epoch, by the node's clock; for display only.
        monotonic: seconds of the node's monotonic clock; differences are durations.
        restart: the round of the workers.
        quiet: seconds since the last output, or the last ``ctx.heartbeat()``, of a worker.
        cpu: percent of one core, all processes of the machine.
        memory: bytes in use on the machine, or in the job's control group.
        load: the load average of one minute.
        received, sent: bytes per second through the network.
        read, written: bytes per second from and to disks.
        workers: the workers by rank.
        gpus: the GPUs, in the order of `NodeFacts.gpus`.
    """

    time: float = _column(_last, "sample_timestamp_seconds", "Time of the sample.")
    monotonic: float = _column(_last)
    restart: int = _column(_last, "restarts_total", "Restarts of the workers.")
    quiet: float = _column(max, "output_age_seconds", "Time since the last output or heartbeat.")
    cpu: float = _column(
        fmean, "node_cpu_seconds_total", "Busy time of all cores of the machine.", scale=0.01,
        total=True,
    )  # fmt: skip
    memory: int = _column(max, "node_memory_used_bytes", "Memory in use.")
    load: float = _column(fmean, "node_load1", "Load average of one minute.")
    received: float = _column(
        fmean, "node_network_receive_bytes_total", "Bytes received.", total=True
    )
    sent: float = _column(fmean, "node_network_transmit_bytes_total", "Bytes sent.", total=True)
    read: float = _column(fmean, "node_disk_read_bytes_total", "Bytes read.", total=True)
    written: float = _column(fmean, "node_disk_written_bytes_total", "Bytes written.", total=True)
    workers: Mapping[int, WorkerSample] = field(default_factory=dict)
    gpus: tuple[GpuSample, ...] = ()


_Row = TypeVar("_Row", Sample, WorkerSample, GpuSample)


# The columns of each kind of sample by the name of the value.
COLUMNS: dict[type, dict[str, Column]] = {
    kind: {one.name: one.metadata["column"] for one in fields(kind) if one.metadata}
    for kind in (Sample, WorkerSample, GpuSample)
}


# -- lines of the file -----------------------------------------------------------------------------


def facts_line(facts: NodeFacts) -> bytes:
    """Return the facts of a node as a line."""
    return _json({**vars(facts), "gpus": [list(vars(gpu).values()) for gpu in facts.gpus]})


def sample_line(sample: Sample) -> bytes:
    """Return a sample as a line."""
    *numbers, _, _ = vars(sample).values()
    workers = [[rank, *_short(vars(worker).values())] for rank, worker in sample.workers.items()]
    gpus = [_short(vars(gpu).values()) for gpu in sample.gpus]
    return _json([round(numbers[0], 2), round(numbers[1], 2), *_short(numbers[2:]), workers, gpus])


def _short(values: Iterable[float | None]) -> list[float | None]:
    """Round numbers for a file: one decimal below 1000, else none."""
    return [
        value if value is None or isinstance(value, int)
        else round(value, 1) if abs(value) < 1000 else round(value)
        for value in values
    ]  # fmt: skip


def _json(value: Any) -> bytes:
    return (json.dumps(value, separators=(",", ":")) + "\n").encode()


# -- several samples -------------------------------------------------------------------------------


def joined(samples: Sequence[Sample]) -> Sample:
    """Return one sample for several of one round: the means of rates and the peaks of levels."""
    ranks = dict.fromkeys(rank for sample in samples for rank in sample.workers)
    return replace(
        _joined(samples),
        workers={
            rank: _joined([one.workers[rank] for one in samples if rank in one.workers])
            for rank in ranks
        },
        gpus=tuple(
            _joined([one.gpus[index] for one in samples if index < len(one.gpus)])
            for index in range(len(samples[-1].gpus))
        ),
    )


def _joined(rows: Sequence[_Row]) -> _Row:
    values: dict[str, Any] = {}
    for name, column in COLUMNS[type(rows[-1])].items():
        known = [one for row in rows if (one := getattr(row, name)) is not None]
        value: Any = column.join(known) if known else None
        values[name] = round(value) if known and isinstance(known[-1], int) else value
    return replace(rows[-1], **values)


class Usage:
    """The running sums of one attempt of a node: means, peaks, and idle time of its GPUs.

    Args:
        sums: the `sums` of another process, to continue them; or with ``at`` alone, the monotonic
            time from which the first sample counts.

    Attributes:
        sums: the sums as plain data, with the keys of JSON.
    """

    def __init__(self, sums: Mapping[str, Any] | None = None) -> None:
        names = ("seconds", "memory_seconds", "memory_peak", "machine_peak", "cpu_peak")
        empty: dict[str, Any] = {**dict.fromkeys(names, 0), "totals": {}, "gpus": []}
        self.sums = {**empty, **(sums or {})}

    def add(self, facts: NodeFacts, sample: Sample) -> None:
        """Add a sample; it stands for the time since the sample before."""
        sums = self.sums
        seconds = sample.monotonic - sums.get("at", sample.monotonic)
        seconds = seconds if 0 <= seconds <= _LONGEST else 0.0
        memory = sum(worker.rss for worker in sample.workers.values())
        cores = sum(worker.cpu for worker in sample.workers.values()) / 100
        sums |= {
            "at": sample.monotonic,
            "host": facts.host,
            "cores": facts.cores,
            "memory": facts.memory,
            "seconds": sums["seconds"] + seconds,
            "memory_seconds": sums["memory_seconds"] + memory * seconds,
            "memory_peak": max(sums["memory_peak"], memory),
            "machine_peak": max(sums["machine_peak"], sample.memory),
            "cpu_peak": max(sums["cpu_peak"], cores),
        }
        rows: dict[str, Sample | WorkerSample] = {"node": sample}
        for key, row in (rows | {str(rank): one for rank, one in sample.workers.items()}).items():
            totals = sums["totals"].setdefault(key, {})
            for name, column in COLUMNS[type(row)].items():
                if column.total:
                    rate = getattr(row, name) * column.scale
                    totals[name] = totals.get(name, 0.0) + rate * seconds
        for index, gpu in enumerate(sample.gpus):
            if index == len(sums["gpus"]):
                names = ("seconds", "use", "idle", "peak", "memory")
                sums["gpus"].append(dict.fromkeys(names, 0.0))
            one = sums["gpus"][index]
            one["memory"] = max(one["memory"], gpu.memory or 0)
            if gpu.use is not None:
                one["seconds"] += seconds
                one["use"] += gpu.use * seconds
                one["idle"] += seconds if gpu.use < IDLE else 0.0
                one["peak"] = max(one["peak"], gpu.use)

    def to_json(self) -> dict[str, Any] | None:
        """Return the means and sums as plain data; None without a sample.

        ``seconds``: covered by samples; ``cpu_seconds``, ``cpu_peak`` (cores) and ``memory_peak``,
        ``memory_mean`` (bytes of RSS) of all workers; ``machine_peak``: memory of the machine or of
        the control group; ``ranks``: per rank its CPU seconds, and the bytes that it has read and
        written; ``gpus``: per GPU the seconds with a known use, those in which it was idle, its
        mean and peak use (percent) and its peak memory.
        """
        sums = self.sums
        if "host" not in sums:
            return None
        seconds = sums["seconds"]
        ranks = {rank: totals for rank, totals in sums["totals"].items() if rank != "node"}
        memory = sums["memory_seconds"] / seconds if seconds else sums["memory_peak"]
        return {
            **{key: sums[key] for key in ("host", "cores", "memory", "memory_peak")},
            "machine_peak": sums["machine_peak"],
            "memory_mean": round(memory),
            "seconds": round(seconds, 1),
            "cpu_seconds": round(sum(totals["cpu"] for totals in ranks.values()), 1),
            "cpu_peak": round(sums["cpu_peak"], 2),
            "ranks": {
                rank: [round(value, 1) for value in totals.values()]
                for rank, totals in ranks.items()
            },
            "gpus": [
                {
                    "seconds": round(one["seconds"], 1),
                    "idle": round(one["idle"], 1),
                    "mean": round(one["use"] / one["seconds"], 1) if one["seconds"] else None,
                    "peak": one["peak"] if one["seconds"] else None,
                    "memory": int(one["memory"]),
                }
                for one in sums["gpus"]
            ],
        }
