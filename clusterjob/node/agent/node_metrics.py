"""The metrics of one node: samples in a thread, a port for Prometheus, sums and durations."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from clusterjob.node import job_processes
from clusterjob.node.agent.node_workers import NodeWorkers
from clusterjob.node.environments import this_node
from clusterjob.node.logs.events import Phase, PhaseBegin, read_phases
from clusterjob.node.metrics.samples import GpuSample, NodeFacts, Sample, SampleWriter, Usage
from clusterjob.node.rendezvous.identity import NodeJob
from clusterjob.node.system import crashes, devices

# Seconds after the workers' start until measuring begins: while they start, they need the CPU.
_FIRST = 4.0
_GPUS_FIRST = 1.0  # seconds in which most drivers answer the first time


class NodeMetrics:
    """Sample the workers of one node in a thread, unless ``--no-metrics`` is given.

    Nothing here may end the job: an error ends the samples.

    Args:
        node: the job, as this node sees it.
        workers: the workers.
    """

    def __init__(self, node: NodeJob, workers: NodeWorkers) -> None:
        self._begin = time.monotonic()
        self._node = node
        self._workers = workers
        self._server: asyncio.Server | None = None
        self._usage = Usage()
        self._latest: tuple[NodeFacts, Sample] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    async def start(self) -> None:
        """Begin the samples, and serve them on --metrics-port; if it is in use, print one line."""
        options, topology = self._node.options, self._node.topology
        if options.metrics:
            self._thread.start()
        if not (port := options.metrics_port):
            return
        if topology.nnodes > 1 and topology.master_addr in ("127.0.0.1", "localhost"):
            port += topology.node_rank  # all nodes are on this machine
        from clusterjob.node.metrics import prometheus

        def text() -> str:
            job_id = self._node.identity.job_id
            return prometheus.text_of(job_id, *self._latest, self._usage) if self._latest else ""

        try:
            self._server = await prometheus.serve(port, text)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", "") or error
            self._node.print_line(
                f"node {topology.node_rank} serves no metrics on port {port}: {why}"
            )

    def end(self) -> dict[str, Any]:
        """End the samples; return their sums and the durations for the end record."""
        if self._server is not None:
            self._server.close()
        self._stop.set()
        if self._node.options.metrics:
            self._thread.join(1.0)  # a sample takes milliseconds, unless the disk hangs
        begins = [
            each
            for each in read_phases(self._node.directory, self._node.topology.node_rank)
            if each.attempt == self._node.identity.attempt
        ]
        return {
            **(self._usage.to_json() or {}),
            "visible_gpus": devices.visible_gpus(os.environ),
            **durations(begins, self._begin, time.monotonic()),
        }

    # -- in the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._sample()
        except Exception as error:
            crashes.summary(error)  # agent.log shows the traceback

    def _sample(self) -> None:
        while not self._ranks():  # the forkserver imports torch
            if self._stop.wait(1.0):
                return
        begin = time.monotonic()
        if self._stop.wait(_FIRST):
            return
        # Loaded now: these imports would delay the start of the workers.
        from clusterjob.node.metrics import sources

        self._usage = Usage(begin)
        machine, workers = sources.Machine(), sources.Workers(self._ranks, begin)
        gpus = sources.GpuReader(os.environ)
        node_rank = self._node.topology.node_rank
        writer = SampleWriter(self._node.directory, node_rank)
        facts = NodeFacts(
            node_rank,
            this_node.node_name(),
            attempt=self._node.identity.attempt,
            cores=devices.usable_cores(),
            memory=machine.memory,
        )
        pause = _GPUS_FIRST
        while not self._stop.wait(pause):
            state = gpus.state()
            if state is not None:
                facts = replace(facts, gpus=state[0])
            waits = {
                rank: {"step": 1000 * wait.step, "waited": 1000 * wait.waited}
                for rank, wait in self._workers.waits().items()
            }
            sample = Sample(
                time.time(),
                time.monotonic(),
                restart=self._workers.report.state.round,
                quiet=time.monotonic() - self._workers.report.alive_at,
                **machine.sample(),
                workers=workers.sample(waits),
                gpus=state[1] if state is not None else (GpuSample(),) * len(facts.gpus),
            )
            self._usage.add(facts, sample)
            self._latest = facts, sample
            pause = writer.add(facts, sample)

    def _ranks(self) -> dict[int, int]:
        """Return the rank of each worker by pid; torchrun may start some later than its agent."""
        ranks = job_processes.of_forkserver(self._workers.forkserver.pid).ranks
        return {each.pid: each.rank for each in ranks if each.rank is not None}


def durations(begins: Iterable[PhaseBegin], begin: float, now: float) -> dict[str, Any]:
    """Return the durations of a node in one attempt, in seconds.

    ``wall``: of the agent; ``waited``: until its workers were started; ``startup``: until they
    ran; ``restarts`` and ``restart_seconds``: from the first end of a worker until the next round
    ran; ``ran``: per rank, from the begin of the last round to the rank's end.

    Args:
        begins: the begins of the phases of the node and of its ranks.
        begin: the begin of the agent, by the node's monotonic clock.
        now: the time by this clock.
    """
    rounds: dict[int, float] = {}
    running: dict[int, float] = {}
    ends: dict[int, dict[str, float]] = {}
    for each in begins:
        begin = min(begin, each.monotonic)
        if each.rank is None and each.phase is Phase.RUNNING:
            rounds[each.restart] = running[each.restart] = each.monotonic
        elif each.phase is Phase.ENDED and each.rank is not None:
            ends.setdefault(each.restart, {})[str(each.rank)] = each.monotonic
        # The first output of a rank that joins no group says nothing about its start.
        elif each.phase is Phase.RUNNING and not each.detail:
            running[each.restart] = max(running.get(each.restart, 0.0), each.monotonic)
    last = max(rounds, default=0)
    lost = sum(
        max(0.0, at - min(ends.get(number - 1, {}).values(), default=rounds[number]))
        for number, at in running.items()
        if number in rounds and number > 0
    )
    return {
        "wall": round(now - begin, 1),
        "waited": round(rounds.get(0, now) - begin, 1),
        "startup": round(running[0] - begin, 1) if 0 in running else None,
        "restarts": last,
        "restart_seconds": round(lost, 1),
        "ran": {
            rank: round(at - rounds[last], 1)
            for rank, at in ends.get(last, {}).items()
            if last in rounds  # a full disk may have lost the begin of a round
        },
    }
