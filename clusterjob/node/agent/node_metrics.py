"""The metrics of one node: whose processes are sampled, their Prometheus port, their sums."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from clusterjob.node import job_processes
from clusterjob.node.agent.node_workers import NodeWorkers
from clusterjob.node.contract import World
from clusterjob.node.environments import this_node
from clusterjob.node.logs.events import Phase, PhaseBegin, read_phases
from clusterjob.node.metrics.sampler import Sampler
from clusterjob.node.metrics.samples import NodeFacts
from clusterjob.node.rendezvous.identity import NodeJob
from clusterjob.node.system import devices, processes
from clusterjob.node.system.shared_note import SharedNote


class NodeMetrics:
    """Sample the workers of one node, unless ``--no-metrics`` is given.

    Args:
        node: the job, as this node sees it.
        forkserver: pid of the forkserver.
        workers: the workers.
        note: keeps the sums for the next agent of this node; None if there will be none.
    """

    def __init__(
        self,
        node: NodeJob,
        forkserver: int,
        workers: NodeWorkers,
        note: SharedNote | None = None,
    ) -> None:
        self._begin = time.monotonic()
        topology, job_dir = node.topology, node.directory
        self._topology = topology
        self._options = node.options
        self._job = node.identity
        self._job_dir = job_dir
        self._forkserver = forkserver
        self._workers = workers
        self._print = node.print_line
        self._rounds: dict[int, float] = {}  # the begin of each
        self._found: dict[int, int] = {}  # the rank of each worker by pid
        self._changed = True
        self._server: asyncio.Server | None = None
        facts = NodeFacts(
            topology.node_rank,
            this_node.node_name(),
            attempt=self._job.attempt,
            cores=devices.usable_cores(),
            memory=0,
        )
        self._sampler = Sampler(
            job_dir,
            facts,
            workers=self._ranks,
            quiet=self._quiet,
            waits=workers.waits.newest,
            environ=os.environ,
            note=note,
        )

    async def serve(self) -> None:
        """Serve the metrics on --metrics-port; if the port is in use, print one line."""
        port = self._options.metrics_port
        if not port:
            return
        if self._topology.nnodes > 1 and self._topology.master_addr in ("127.0.0.1", "localhost"):
            port += self._topology.node_rank  # all nodes are on this machine
        from clusterjob.node.metrics import prometheus

        try:
            self._server = await prometheus.serve(
                port,
                lambda: prometheus.text_of(
                    self._job.job_id, self._sampler.latest, self._sampler.usage
                ),
            )
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", "") or error
            self._print(f"node {self._topology.node_rank} serves no metrics on port {port}: {why}")

    def begin_round(self, world: World) -> None:
        """Follow the workers of a round that starts."""
        self._rounds[world.restart] = time.monotonic()
        self._changed = True
        if self._options.metrics:
            self._sampler.begin_round(world.restart)

    def end(self) -> dict[str, Any]:
        """End the samples; return the sums for the end record."""
        if self._server is not None:
            self._server.close()
        sums = self._sampler.stop() or {}
        if self._sampler.error:
            self._print(
                f"node {self._topology.node_rank} has no more metrics: {self._sampler.error}"
            )
        return sums | self._durations()

    def _quiet(self) -> float:
        began = max(self._rounds.values())
        return time.monotonic() - max(
            self._workers.timeline.grown_at, self._workers.alive_at, began
        )

    # -- the workers -------------------------------------------------------------------------------

    def _ranks(self) -> dict[int, int]:
        """Return the rank of each worker by pid; called by the sampler's thread."""
        alive = [processes.start_ticks(pid) is not None for pid in self._found]
        # torchrun may start workers later than its agent.
        complete = all(alive) or self._options.launcher == "agent"
        if self._changed or not (any(alive) and complete):
            ranks = job_processes.of_forkserver(self._forkserver).ranks
            found = {each.pid: each.rank for each in ranks if each.rank is not None}
            # The table of the last round is there until the forkserver begins the next one.
            if any(processes.start_ticks(pid) is not None for pid in found):
                self._found, self._changed = found, False
        return self._found

    # -- the end record ----------------------------------------------------------------------------

    def _durations(self) -> dict[str, Any]:
        """Return the number of this node's GPUs, and durations by its monotonic clock, in seconds.

        ``wall``: of the agent; ``waited``: until its workers were started; ``startup``: until they
        ran; ``restarts`` and ``restart_seconds``: from the first end of a worker until the next
        round ran; ``ran``: per rank, from the begin of the last round to the rank's end.
        """
        now = time.monotonic()
        begins = [
            each
            for each in read_phases(self._job_dir, self._topology.node_rank)
            if each.attempt == self._job.attempt
        ]
        first = min((each.monotonic for each in begins), default=self._begin)
        # A phase of another boot is not of this attempt.
        begin = first if now - 30 * 86400 < first <= self._begin else self._begin
        # The first output of a rank that joins no group says nothing about its start.
        formed = [each for each in begins if each.phase is not Phase.RUNNING or not each.detail]
        # An agent that was started again knows the rounds before from the file.
        rounds = {
            each.restart: each.monotonic
            for each in begins
            if each.phase is Phase.RUNNING and each.rank is None and each.monotonic <= self._begin
        } | self._rounds
        running = {
            number: _last(formed, Phase.RUNNING, number) or at for number, at in rounds.items()
        }
        last = max(rounds, default=-1)
        lost = 0.0
        for number in running.keys() - {0}:
            ended = _times(begins, Phase.ENDED, number - 1)
            if not ended:  # the agent was killed
                began = rounds.get(number - 1, self._begin) < self._begin < rounds[number]
                ended = [self._begin if began else rounds[number]]
            lost += max(0.0, running[number] - min(ended))
        return {
            "visible_gpus": devices.visible_gpus(os.environ),
            "wall": round(now - begin, 1),
            "waited": round(rounds.get(0, now) - begin, 1),
            "startup": round(running[0] - begin, 1) if 0 in running else None,
            "restarts": max(0, last),
            "restart_seconds": round(lost, 1),
            "ran": {
                str(each.rank): round(each.monotonic - rounds[last], 1)
                for each in begins
                if each.phase is Phase.ENDED and each.restart == last and each.rank is not None
            },
        }


def _times(begins: list[PhaseBegin], phase: Phase, restart: int) -> list[float]:
    return [
        each.monotonic
        for each in begins
        if each.phase is phase and each.restart == restart and each.rank is not None
    ]


def _last(begins: list[PhaseBegin], phase: Phase, restart: int) -> float | None:
    return max(_times(begins, phase, restart), default=None)
