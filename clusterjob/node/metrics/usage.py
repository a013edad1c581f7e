"""Sum up the samples of a node for its end record: means, peaks, and idle time of its GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clusterjob.node.metrics.samples import NodeFacts, Sample

IDLE = 5.0  # percent: a GPU with less use counts as idle
_LONGEST = 130.0  # seconds between two samples that are not a gap; thinned ones are 60 s apart


class Usage:
    """The running sums of one attempt of a node.

    Args:
        begin: the monotonic time from which the first sample counts; None for its own time.
    """

    def __init__(self, begin: float | None = None) -> None:
        self._at = begin
        self._facts: NodeFacts | None = None
        self._seconds = 0.0
        self._cpu = self._cpu_peak = 0.0  # core-seconds, cores
        self._memory = 0.0  # byte-seconds
        self._memory_peak = self._machine_peak = 0
        # CPU seconds, bytes read, bytes written.
        self._ranks: dict[int, list[float]] = {}
        self._bytes = dict.fromkeys(("received", "sent", "read", "written"), 0.0)
        self._machine_cpu = 0.0
        self._gpus: dict[int, dict[str, float]] = {}  # by position

    def add(self, facts: NodeFacts, sample: Sample) -> None:
        """Add a sample; it stands for the time since the sample before."""
        self._facts = facts
        seconds = 0.0 if self._at is None else sample.monotonic - self._at
        seconds = seconds if 0 <= seconds <= _LONGEST else 0.0
        self._at = sample.monotonic
        self._seconds += seconds
        cores = memory = 0.0
        for rank, worker in sample.workers.items():
            cores += worker.cpu / 100
            memory += worker.rss
            sums = self._ranks.setdefault(rank, [0.0, 0.0, 0.0])
            sums[0] += worker.cpu / 100 * seconds
            sums[1] += worker.read * seconds
            sums[2] += worker.written * seconds
        self._machine_cpu += sample.cpu / 100 * seconds
        for name in self._bytes:
            self._bytes[name] += getattr(sample, name) * seconds
        self._cpu += cores * seconds
        self._cpu_peak = max(self._cpu_peak, cores)
        self._memory += memory * seconds
        self._memory_peak = max(self._memory_peak, int(memory))
        self._machine_peak = max(self._machine_peak, sample.memory)
        for index, gpu in enumerate(sample.gpus):
            one = self._gpus.setdefault(
                index, {"seconds": 0.0, "use": 0.0, "idle": 0.0, "peak": 0.0, "memory": 0.0}
            )
            one["memory"] = max(one["memory"], gpu.memory or 0)
            if gpu.use is not None:
                one["seconds"] += seconds
                one["use"] += gpu.use * seconds
                one["idle"] += seconds if gpu.use < IDLE else 0.0
                one["peak"] = max(one["peak"], gpu.use)

    def state(self) -> dict[str, Any]:
        """Return the sums as plain data for `restore`."""
        return {name: value for name, value in vars(self).items() if name != "_facts"}

    def restore(self, facts: NodeFacts, state: Mapping[str, Any]) -> None:
        """Continue the sums of another process; after JSON, the keys of dictionaries are text."""
        vars(self).update(state)
        self._facts = facts
        self._ranks = {int(rank): sums for rank, sums in state["_ranks"].items()}
        self._gpus = {int(index): sums for index, sums in state["_gpus"].items()}

    def to_json(self) -> dict[str, Any] | None:
        """Return the sums as plain data; None without a sample.

        ``seconds``: covered by samples; ``cpu_seconds``, ``cpu_peak`` (cores) and ``memory_peak``,
        ``memory_mean`` (bytes of RSS) of all workers; ``machine_peak``: memory of the machine or of
        the control group; ``machine_cpu_seconds``; the bytes ``received``, ``sent``, ``read`` and
        ``written`` by the machine; ``ranks``: per rank its CPU seconds, and the bytes that
        it has read and written; ``gpus``: per GPU the seconds with a known use, those in
        which it was idle, its mean and peak use (percent) and its peak memory.
        """
        facts, seconds = self._facts, self._seconds
        if facts is None:
            return None
        return {
            "host": facts.host,
            "cores": facts.cores,
            "memory": facts.memory,
            "seconds": round(seconds, 1),
            "cpu_seconds": round(self._cpu, 1),
            "cpu_peak": round(self._cpu_peak, 2),
            "memory_mean": round(self._memory / seconds) if seconds else self._memory_peak,
            "memory_peak": self._memory_peak,
            "machine_peak": self._machine_peak,
            "machine_cpu_seconds": round(self._machine_cpu, 1),
            **{name: round(value) for name, value in self._bytes.items()},
            "ranks": {
                str(rank): [round(sums[0], 1), *map(round, sums[1:])]
                for rank, sums in self._ranks.items()
            },
            "gpus": [
                {
                    "seconds": round(one["seconds"], 1),
                    "idle": round(one["idle"], 1),
                    "mean": round(one["use"] / one["seconds"], 1) if one["seconds"] else None,
                    "peak": one["peak"] if one["seconds"] else None,
                    "memory": int(one["memory"]),
                }
                for _, one in sorted(self._gpus.items())
            ],
        }
