"""Write the files of a job that looks as if it ran here: a record, logs, phases and metrics."""

from __future__ import annotations

import math
import socket
import time
from pathlib import Path
from typing import Any

from clusterjob.core.records import Handle, ProcessIdentity, Record, Records, home, secure_home
from clusterjob.node.logs.events import EventLog, Phase, PhaseBegin, PhaseLog
from clusterjob.node.logs.job_dir import EVENTS
from clusterjob.node.logs.log_files import LogLine, LogReader, Timeline, node_directory
from clusterjob.node.metrics.samples import (
    Gpu,
    GpuSample,
    NodeFacts,
    Sample,
    SampleWriter,
    WorkerSample,
)

GIB = 1 << 30


def lines_of(reader: LogReader, *, end: bool = False) -> list[LogLine]:
    return [line for lines in reader.batches(end=end) for line in lines]


class WrittenJob:
    """A job whose agent is this process, as its record says.

    Args:
        job_id: the id.
        nodes, ranks: the number of nodes, and of ranks per node.
        gpus: the number of GPUs per node.
    """

    def __init__(self, job_id: str, *, nodes: int = 1, ranks: int = 2, gpus: int = 0) -> None:
        self.nodes, self.per_node, self._step = nodes, ranks, 0
        secure_home()
        self.dir: Path = home() / "jobs" / job_id
        me = ProcessIdentity.of_this_process()
        handle = Handle(
            "local",
            job_id,
            data={
                "agents": [{"pid": me.pid, "ticks": me.ticks}],
                "boot_id": me.boot_id,
                "host": me.host,
            },
        )
        for node in range(nodes):
            node_directory(self.dir, node).mkdir(parents=True)
        self.record = Record(
            job_id,
            "train",
            cluster="local",
            backend="local",
            job_dir=self.dir,
            nodes=nodes,
            submitted_at=time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime()),
            spec=self._spec(ranks),
            handle=handle,
        )
        Records().save(self.record)
        events = EventLog(self.dir / EVENTS)
        events.add("started", restart=0)
        self.facts = [
            NodeFacts(
                node,
                socket.gethostname() if nodes == 1 else f"gpu{node:02}",
                attempt=0,
                cores=64,
                memory=512 * GIB,
                gpus=tuple(Gpu(n, f"GPU-{n}", "H100", memory=80 * GIB) for n in range(gpus)),
            )
            for node in range(nodes)
        ]
        self._writers = [SampleWriter(self.dir, node) for node in range(nodes)]
        self._timelines = [Timeline(node_directory(self.dir, node)) for node in range(nodes)]
        for node in range(nodes):
            self.begin(Phase.RUNNING, node, None)
            for rank in self.ranks_of(node):
                self.begin(Phase.RUNNING, node, rank)

    @staticmethod
    def _spec(ranks: int) -> dict[str, Any]:
        from clusterjob.core.resources import Resources
        from clusterjob.core.spec import JobSpec
        from clusterjob.node.program import Program

        return JobSpec(
            Program("module", "train"),
            name="train",
            workdir=Path("/"),
            nproc_per_node=ranks,
            resources=Resources(),
        ).to_json()

    def ranks_of(self, node: int) -> range:
        return range(node * self.per_node, (node + 1) * self.per_node)

    def begin(self, phase: Phase, node: int, rank: int | None, detail: str = "") -> None:
        log = PhaseLog(self.dir, node)
        now = (time.time(), time.monotonic())
        log.add(PhaseBegin(phase, rank, 0, attempt=0, time=now[0], monotonic=now[1], detail=detail))

    def print(self, rank: int, text: str, stream: str = "out") -> None:
        """Append a line to a rank's log, and record it in the timeline."""
        node = rank // self.per_node
        with (node_directory(self.dir, node) / f"rank{rank}.{stream}").open("a") as log:
            log.write(text + "\n")
        timeline = self._timelines[node]
        timeline.follow([node_directory(self.dir, node) / f"rank{rank}.{stream}"])
        timeline.note()

    def sample(self, node: int, *, ago: float = 0.0) -> None:
        """Append a sample of a node."""
        facts, step = self.facts[node], self._step
        workers = tuple(
            WorkerSample(
                rank,
                60 + 40 * math.sin(step / 3 + rank) if rank % 7 != 3 else 2.0,
                int((1 + rank % 5) * GIB),
                read=1e6,
                written=0.0,
                threads=12,
            )
            for rank in self.ranks_of(node)
        )
        gpus = [
            GpuSample(90 + 10 * math.sin(step / 4 + n), 61 * GIB, power=650.0, temperature=63.0)
            for n in range(len(facts.gpus))
        ]
        self._writers[node].add(
            facts,
            Sample(
                time.time() - ago,
                time.monotonic() - ago,
                restart=0,
                quiet=0.0,
                cpu=sum(worker.cpu for worker in workers),
                memory=sum(worker.rss for worker in workers),
                load=len(workers) * 0.9,
                received=3e6,
                sent=2.5e6,
                read=1e6,
                written=0.0,
                workers=workers,
                gpus=tuple(gpus),
            ),
        )

    def past(self, count: int) -> None:
        """Append samples of the past, 5 s apart."""
        for number in range(count, 0, -1):
            self._step += 1
            for node in range(self.nodes):
                self.sample(node, ago=5.0 * number)

    def grow(self, *, every: int = 1) -> None:
        """Append a sample of each node, and a line of each rank whose number divides by `every`."""
        self._step += 1
        for node in range(self.nodes):
            self.sample(node)
            for rank in self.ranks_of(node):
                if rank % every == 0:
                    self.print(rank, f"epoch 3 step {self._step} loss {2 / self._step:.4f}")
