"""Sample a node every 5 s in a thread of its agent, for its file, Prometheus and its end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterjob.node.logs.job_dir import METRICS
from clusterjob.node.logs.log_files import node_directory
from clusterjob.node.metrics import samples
from clusterjob.node.metrics.samples import GpuSample, NodeFacts, Sample, Usage, WorkerSample
from clusterjob.node.metrics.stragglers import Wait
from clusterjob.node.system import crashes
from clusterjob.node.system.files import Appender
from clusterjob.node.system.shared_note import SharedNote

INTERVAL = 5.0  # seconds between two samples
# While workers start, they need the CPU: the first sample is taken this many seconds after they
# have been started, or after a longer time, if the import of torch does not end.
_FIRST, _LATEST = 4.0, 30.0
_GPUS_FIRST = 1.0  # seconds in which most drivers answer the first time
# Seconds without an answer of the driver after which values are unknown.
_GPU_TIMEOUT = 3 * INTERVAL
# The file grows slowly: its lines are as far apart as this share of the time since the first one,
# at most `_LARGEST_GAP` seconds, but farther if they are long, because the node has many workers.
_SHARE, _LARGEST_GAP = 1 / 720, 20.0
_HOUR_BYTES = 750_000  # maximum growth
_FACTS_EACH = 64 << 10  # bytes between two lines with the facts, for readers of the file's end


class Sampler:
    """Sample one node from its first round of workers to its end.

    Nothing here may end the job: an error ends the samples. The modules that measure are loaded
    by the thread, after the workers' start.

    Args:
        job_dir: the job's directory.
        facts: the node; memory and GPUs are found later.
        workers: returns the rank of each worker by pid.
        quiet: returns the seconds since the last output or heartbeat of a worker.
        waits: returns how long each rank waits in collectives.
        environ: selects the GPUs.
        note: keeps the sums for the next agent of this node; None if there will be none.

    Attributes:
        latest: the node and its newest sample; None before the first one.
        usage: the sums of the samples, with those of agents that were killed.
        error: why the samples have ended; empty while they go on.
    """

    def __init__(
        self,
        job_dir: Path,
        facts: NodeFacts,
        workers: Callable[[], Mapping[int, int]],
        quiet: Callable[[], float],
        waits: Callable[[], Mapping[int, Wait]],
        environ: Mapping[str, str],
        note: SharedNote | None = None,
    ) -> None:
        self.latest: tuple[NodeFacts, Sample] | None = None
        self.usage = Usage(note.read() if note is not None else None)
        self.error = ""
        self._restart = 0  # the number of the current round
        self._job_dir = job_dir
        self._facts = facts
        self._workers = workers
        self._quiet = quiet
        self._waits = waits
        self._environ = environ
        self._note = note
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin_round(self, restart: int) -> None:
        """Note the number of a round that starts; the first one starts the samples."""
        self._restart = restart
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
            self._thread.start()

    def stop(self) -> dict[str, Any] | None:
        """End the samples; return their sums for the end record, None without a sample."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(1.0)  # a sample takes milliseconds, unless the disk hangs
        return self.usage.to_json()

    def _run(self) -> None:
        try:
            latest = time.monotonic() + _LATEST
            while not self._workers() and time.monotonic() < latest:
                if self._stop.wait(1.0):
                    return
            self.usage.sums.setdefault("at", time.monotonic())
            if not self._stop.wait(_FIRST):
                self._sample()
        except Exception as error:
            self.error = crashes.summary(error)

    def _sample(self) -> None:
        # Loaded now: these imports would delay the start of the workers.
        from clusterjob.node.metrics import sources

        machine, workers = sources.Machine(), sources.Workers(self._workers)
        facts = replace(self._facts, memory=machine.memory)
        gpus = sources.Background("gpus", lambda: sources.open_gpus(self._environ), INTERVAL)
        writer: SampleWriter | None = None
        self._stop.wait(_GPUS_FIRST)
        due = time.monotonic()
        while not self._stop.wait(due - time.monotonic()):
            found = gpus.value if time.monotonic() - gpus.at < _GPU_TIMEOUT else None
            if found is not None and found[0] != facts.gpus:
                facts, writer = replace(facts, gpus=found[0]), None
            if writer is None:
                writer = SampleWriter(self._job_dir, facts)
            sample = Sample(
                time.time(),
                time.monotonic(),
                restart=self._restart,
                quiet=self._quiet(),
                **machine.sample(),
                workers=self._with_waits(workers.sample()),
                gpus=found[1] if found is not None else (GpuSample(),) * len(facts.gpus),
            )
            writer.add(sample)
            self.usage.add(facts, sample)
            self.latest = facts, sample
            if self._note is not None:
                self._note.write(self.usage.sums)
            due = max(due + INTERVAL, time.monotonic())
        if writer is not None:
            writer.flush()
        workers.stop()
        gpus.stop()

    def _with_waits(self, workers: dict[int, WorkerSample]) -> dict[int, WorkerSample]:
        """Return the workers with their waits, in milliseconds."""
        for rank, wait in self._waits().items():
            if rank in workers:
                step, waited = round(1000 * wait.step, 1), round(1000 * wait.waited, 1)
                workers[rank] = replace(workers[rank], step=step, waited=waited)
        return workers


class SampleWriter:
    """Append samples to the file of a node; several become one line if the file grows too fast.

    Args:
        job_dir: the job's directory.
        facts: the node.
    """

    def __init__(self, job_dir: Path, facts: NodeFacts) -> None:
        self._file = Appender(node_directory(job_dir, facts.node_rank) / METRICS)
        self._samples: list[Sample] = []
        self._begin: float | None = None
        self._written = float("-inf")  # the time of the last sample that was written
        self._gap = INTERVAL
        self._header = samples.facts_line(facts)
        self._until_header = _FACTS_EACH
        self._append(b"\n" + self._header)  # an earlier agent may have cut its line

    def add(self, sample: Sample) -> None:
        """Add a sample, and write a line if the last line is old enough."""
        if self._samples and self._samples[-1].restart != sample.restart:
            self.flush()
        self._samples.append(sample)
        # Samples are not exactly as far apart as planned.
        if sample.monotonic - self._written >= 0.9 * self._gap:
            self.flush()

    def flush(self) -> None:
        """Write the samples that were not written yet."""
        if not self._samples:
            return
        line = samples.sample_line(samples.joined(self._samples))
        self._written = self._samples[-1].monotonic
        self._begin = self._written if self._begin is None else self._begin
        share = min((self._written - self._begin) * _SHARE, _LARGEST_GAP)
        self._gap = max(INTERVAL, share, len(line) * 3600 / _HOUR_BYTES)
        self._samples = []
        self._until_header -= len(line)
        if self._until_header < 0:
            line += self._header
            self._until_header = _FACTS_EACH
        self._append(line)

    def _append(self, line: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk loses it
            self._file.write(line)
