"""Sample a node every 5 s in a thread of its agent, for files, Prometheus and its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterjob.node.metrics.samples import GpuSample, NodeFacts, Sample, WorkerSample
from clusterjob.node.metrics.stragglers import Wait
from clusterjob.node.system import crashes
from clusterjob.node.system.shared_note import SharedNote

INTERVAL = 5.0  # seconds between two samples
# While workers start, they need the CPU: the first sample is taken this many seconds after they
# have been started, or after a longer time, if the import of torch does not end.
_FIRST, _LATEST = 5.0, 30.0
# Seconds without an answer of the driver after which values are unknown.
_GPU_TIMEOUT = 3 * INTERVAL


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
        usage: the sums of the samples; None before the first one.
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
        self.usage: dict[str, Any] | None = None
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
        if self.usage is None and self._note is not None:
            # No sample since the last agent was killed: the sums are those of that agent.
            return self._note.read().get("usage")
        return self.usage

    def _run(self) -> None:
        try:
            latest = time.monotonic() + _LATEST
            while not self._workers() and time.monotonic() < latest:
                if self._stop.wait(1.0):
                    return
            begin = time.monotonic()
            if not self._stop.wait(_FIRST):
                self._sample(begin)
        except Exception as error:
            self.error = crashes.summary(error)

    def _sample(self, begin: float) -> None:
        # Loaded now: these imports would delay the start of the workers.
        from clusterjob.node.metrics.background import Background
        from clusterjob.node.metrics.gpus import Gpus
        from clusterjob.node.metrics.machine import Machine
        from clusterjob.node.metrics.usage import Usage
        from clusterjob.node.metrics.worker_use import WorkerUse
        from clusterjob.node.metrics.writer import SegmentWriter

        machine, workers, usage = Machine(), WorkerUse(self._workers), Usage(begin)
        facts = replace(self._facts, memory=machine.memory)
        if self._note is not None and (kept := self._note.read()):
            usage.restore(facts, kept["state"])
        gpus = Background("gpus", Gpus(self._environ).read, pause=lambda took: max(INTERVAL, took))
        writer: SegmentWriter | None = None
        gpus.done.wait(1.0)
        due = time.monotonic()
        while True:
            found = gpus.value(_GPU_TIMEOUT)
            if found is not None and found[0] != facts.gpus:
                facts, writer = replace(facts, gpus=found[0]), None
            if writer is None:
                writer = SegmentWriter(self._job_dir, facts, INTERVAL)
            sample = Sample(
                time.time(),
                time.monotonic(),
                restart=self._restart,
                quiet=self._quiet(),
                **vars(machine.sample()),
                workers=self._with_waits(workers.sample()),
                gpus=found[1] if found is not None else (GpuSample(),) * len(facts.gpus),
            )
            writer.add(sample)
            usage.add(facts, sample)
            self.latest, self.usage = (facts, sample), usage.to_json()
            if self._note is not None:
                self._note.write({"state": usage.state(), "usage": self.usage})
            due = max(due + INTERVAL, time.monotonic())
            if self._stop.wait(due - time.monotonic()):
                break
        writer.close()
        workers.stop()
        gpus.stop()

    def _with_waits(self, workers: dict[int, WorkerSample]) -> dict[int, WorkerSample]:
        """Return the workers with their waits, in milliseconds."""
        for rank, wait in self._waits().items():
            if rank in workers:
                step, waited = round(1000 * wait.step, 1), round(1000 * wait.waited, 1)
                workers[rank] = replace(workers[rank], step=step, waited=waited)
        return workers
