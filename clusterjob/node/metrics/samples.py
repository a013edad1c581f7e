"""The samples of a node: one table of values for agent, file, Prometheus and readers.

A node writes ``logs/node<k>/metrics.jsonl``. An object has the `NodeFacts`, and an array a sample
of the node in the last object: the values of `Sample` in their order, with an array for each worker
and for each GPU. `clusterjob.insight.sample_files` reads it.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from clusterjob.node.logs.job_dir import METRICS
from clusterjob.node.logs.log_files import node_directory
from clusterjob.node.system.files import Appender

IDLE = 5.0  # percent: a GPU with less use counts as idle
INTERVAL = 5.0  # seconds between the first samples
# The file grows slowly. After the first hour, each pause between samples is longer than the last
# one, up to `_LARGEST_PAUSE` seconds; with long lines, because of many workers, all are longer.
_HOUR_SAMPLES, _LARGEST_PAUSE = 720, 20.0
_HOUR_BYTES = 750_000  # maximum growth
_FACTS_EACH = 50  # samples between two lines with the facts, for readers of the file's end


def _column(
    family: str = "",
    text: str = "",
    default: Any = MISSING,
    *,
    scale: float = 1.0,
    total: bool = False,
) -> Any:
    """Return the field of a value.

    Args:
        family: name of the family, without ``clusterjob_``; one with the suffix ``_total`` is a
            counter. Empty for a value that Prometheus does not get.
        text: what the family is.
        default: the default value.
        scale: factor from the value to the unit of Prometheus.
        total: whether the value is a rate whose sum over the time is shown.
    """
    column = {"family": family, "text": text, "scale": scale, "total": total}
    return field(default=default, metadata=column)


_rate = functools.partial(_column, total=True)
_gpu = functools.partial(_column, default=None)


@dataclass(frozen=True)
class WorkerSample:
    """What one worker, with the processes below it, used since the last sample.

    Attributes:
        rank: the worker.
        cpu: percent of one core.
        rss: resident memory, bytes.
        read, written: bytes per second from and to disks.
        threads: number of threads.
        step: the mean length of its last steps, milliseconds; None if it is unknown.
        waited: its mean wait in collectives in a step, milliseconds.
    """

    rank: int
    cpu: float = _rate("worker_cpu_seconds_total", "CPU time of the rank's processes.", scale=0.01)
    rss: int = _column("worker_resident_memory_bytes", "Resident memory.")
    read: float = _rate("worker_disk_read_bytes_total", "Bytes read by the rank.")
    written: float = _rate("worker_disk_written_bytes_total", "Bytes written by the rank.")
    threads: int = _column("worker_threads", "Threads.")
    step: float | None = None
    waited: float | None = None


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

    use: float | None = _gpu(
        "gpu_utilization_ratio", "Share of the time in which a kernel ran.", scale=0.01
    )
    memory: int | None = _gpu("gpu_memory_used_bytes", "Memory in use.")
    power: float | None = _gpu("gpu_power_watts", "Power.")
    temperature: float | None = _gpu("gpu_temperature_celsius", "Temperature.")
    sm_clock: int | None = _gpu("gpu_sm_clock_hertz", "Clock of the multiprocessors.", scale=10**6)
    memory_clock: int | None = _gpu("gpu_memory_clock_hertz", "Clock of the memory.", scale=10**6)
    ecc: int | None = _gpu(
        "gpu_ecc_uncorrected_errors_total", "Uncorrected ECC errors since the driver load."
    )
    xid: int | None = _gpu("gpu_last_xid", "The last XID error code; 0 for none.")


@dataclass(frozen=True)
class Gpu:
    """A GPU of a node: its index, its UUID, its name and its memory in bytes."""

    index: int
    uuid: str
    name: str
    memory: int = _column("gpu_memory_size_bytes", "Memory of the GPU.")


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
    cores: int = _column("node_cpu_cores", "Cores that the job may use.")
    memory: int = _column("node_memory_limit_bytes", "Memory that the job may use.")
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
        workers: the workers.
        gpus: the GPUs, in the order of `NodeFacts.gpus`.
    """

    time: float = _column("sample_timestamp_seconds", "Time of the sample.")
    monotonic: float = _column()
    restart: int = _column("restarts_total", "Restarts of the workers.")
    quiet: float = _column("output_age_seconds", "Time since the last output or heartbeat.")
    cpu: float = _rate(
        "node_cpu_seconds_total", "Busy time of all cores of the machine.", scale=0.01
    )
    memory: int = _column("node_memory_used_bytes", "Memory in use.")
    load: float = _column("node_load1", "Load average of one minute.")
    received: float = _rate("node_network_receive_bytes_total", "Bytes received.")
    sent: float = _rate("node_network_transmit_bytes_total", "Bytes sent.")
    read: float = _rate("node_disk_read_bytes_total", "Bytes read.")
    written: float = _rate("node_disk_written_bytes_total", "Bytes written.")
    workers: tuple[WorkerSample, ...] = ()
    gpus: tuple[GpuSample, ...] = ()


def columns(kind: type) -> dict[str, Mapping[str, Any]]:
    """Return the arguments of `_column` for the values of a kind of sample, by name."""
    return {one.name: one.metadata for one in fields(kind) if one.metadata.get("family")}


class SampleWriter:
    """Append the samples of a node to its file."""

    def __init__(self, job_dir: Path, node_rank: int) -> None:
        self._file = Appender(node_directory(job_dir, node_rank) / METRICS)
        self._facts: NodeFacts | None = None
        self._count = 0

    def add(self, facts: NodeFacts, sample: Sample) -> float:
        """Append a sample; return the seconds until the next one."""
        data = line = _json(_plain(sample))
        if facts != self._facts or self._count % _FACTS_EACH == 0:
            self._facts = facts
            # An earlier agent may have cut its last line.
            data = b"\n" + _json({name: _plain(one) for name, one in vars(facts).items()}) + line
        self._count += 1
        with contextlib.suppress(OSError):  # a full disk loses it
            self._file.write(data)
        growth = (1 + 1 / _HOUR_SAMPLES) ** max(0, self._count - _HOUR_SAMPLES)
        return max(min(INTERVAL * growth, _LARGEST_PAUSE), len(line) * 3600 / _HOUR_BYTES)


def _plain(value: Any) -> Any:
    """Return a sample or its value as lists and numbers, of which 0.1 is enough."""
    if is_dataclass(value):
        return [_plain(each) for each in vars(value).values()]
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return round(value, 1) if isinstance(value, float) else value


def _json(value: Any) -> bytes:
    return (json.dumps(value, separators=(",", ":")) + "\n").encode()


class Usage:
    """The running sums of one attempt of a node: means, peaks, and idle time of its GPUs.

    Args:
        at: the monotonic time from which the first sample counts; None for its own time.

    Attributes:
        totals: the sums of rates, by ``node`` or rank, and by name.
    """

    def __init__(self, at: float | None = None) -> None:
        self.totals: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._at = at
        self._facts: NodeFacts | None = None
        self._seconds = self._memory_seconds = 0.0
        self._peaks: dict[str, float] = defaultdict(float)
        self._gpus: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def add(self, facts: NodeFacts, sample: Sample) -> None:
        """Add a sample; it stands for the time since the sample before."""
        seconds = 0.0 if self._at is None else sample.monotonic - self._at
        self._at, self._facts = sample.monotonic, facts
        memory = sum(worker.rss for worker in sample.workers)
        cores = sum(worker.cpu for worker in sample.workers) / 100
        self._seconds += seconds
        self._memory_seconds += memory * seconds
        peaks = {"memory_peak": memory, "machine_peak": sample.memory, "cpu_peak": cores}
        for name, value in peaks.items():
            self._peaks[name] = max(self._peaks[name], value)
        self._add_rates("node", Sample, sample, seconds)
        for worker in sample.workers:
            self._add_rates(str(worker.rank), WorkerSample, worker, seconds)
        for index, gpu in enumerate(sample.gpus):
            sums = self._gpus[index]
            sums["memory"] = max(sums["memory"], gpu.memory or 0)
            if gpu.use is not None:
                sums["seconds"] += seconds
                sums["use"] += gpu.use * seconds
                sums["idle"] += seconds if gpu.use < IDLE else 0.0
                sums["peak"] = max(sums["peak"], gpu.use)

    def _add_rates(self, key: str, kind: type, row: object, seconds: float) -> None:
        for name, column in columns(kind).items():
            if column["total"]:
                self.totals[key][name] += getattr(row, name) * column["scale"] * seconds

    def to_json(self) -> dict[str, Any] | None:
        """Return the means and sums as plain data; None without a sample.

        ``seconds``: covered by samples; ``cpu_seconds``, ``cpu_peak`` (cores) and ``memory_peak``,
        ``memory_mean`` (bytes of RSS) of all workers; ``machine_peak``: memory of the machine or of
        the control group; ``ranks``: per rank its CPU seconds, and the bytes that it has read and
        written; ``gpus``: per GPU the seconds with a known use, those in which it was idle, its
        mean and peak use (percent) and its peak memory.
        """
        if self._facts is None:
            return None
        ranks = {rank: totals for rank, totals in self.totals.items() if rank != "node"}
        seconds, peaks = self._seconds, self._peaks
        memory = self._memory_seconds / seconds if seconds else peaks["memory_peak"]
        return {
            **{name: getattr(self._facts, name) for name in ("host", "cores", "memory")},
            "memory_peak": peaks["memory_peak"],
            "machine_peak": peaks["machine_peak"],
            "memory_mean": round(memory),
            "seconds": round(seconds, 1),
            "cpu_seconds": round(sum(totals["cpu"] for totals in ranks.values()), 1),
            "cpu_peak": round(peaks["cpu_peak"], 2),
            "ranks": {
                rank: [round(totals[name], 1) for name in ("cpu", "read", "written")]
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
                for one in self._gpus.values()
            ],
        }
