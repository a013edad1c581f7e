"""Write the files of a job as its agents and its coordinator do, without running it."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from launching import write_tree
from written_job import GIB

from clusterjob.backends.base import Straggler
from clusterjob.core.records import Record
from clusterjob.node.logs import ends, events
from clusterjob.node.logs.events import Phase, PhaseBegin, PhaseLog
from clusterjob.node.logs.log_files import node_directory
from clusterjob.node.metrics.samples import (
    Gpu,
    GpuSample,
    NodeFacts,
    Sample,
    SampleWriter,
    WorkerSample,
)
from clusterjob.node.verdict import Failure, FailureKind, JobState, Verdict

HOSTILE = "<script>alert(1)</script> \x1b]0;title\x07 \x1b[31mred\x1b[0m \u202e & \"quoted\" 'text'"


@dataclass
class WrittenJob:
    """A job to write: its size and what happens to it.

    Attributes:
        home: the directory of clusterjob's state.
        nodes, per_node: the nodes and the ranks of each.
        seconds: how long it runs.
        interval: seconds between two samples.
        failed: the rank that fails at the end; None for a success.
        restarts: rounds that failed before the last one.
        gpus: whether each rank has a GPU.
    """

    home: Path
    nodes: int = 2
    per_node: int = 1
    seconds: float = 600.0
    interval: float = 5.0
    failed: int | None = 1
    restarts: int = 0
    gpus: bool = True
    job_id: str = "train-abc123"
    ended: bool = True

    @property
    def job_dir(self) -> Path:
        return self.home / "jobs" / self.job_id

    @property
    def world(self) -> int:
        return self.nodes * self.per_node

    def write(self) -> Record:
        """Write all files and return the job's record."""
        self.job_dir.mkdir(parents=True)
        ends.directory(self.job_dir).mkdir()
        for node in range(self.nodes):
            node_directory(self.job_dir, node).mkdir(parents=True)
            self._phases(node)
            self._metrics(node)
            self._logs(node)
            detected = {
                "source": "slurm", "level": "node", "nnodes": self.nodes, "node_rank": node,
                "evidence": {"nnodes": "SLURM_NNODES", "node_rank": "SLURM_NODEID"},
                "ignored": [{"variable": "RANK", "why": "of another job"}], "conflicts": [],
            }  # fmt: skip
            if self.ended:
                ends.write(self.job_dir, node, {"attempt": 0, "usage": self._usage(node)})
            events.add_environment(self.job_dir, node, detected, attempt=0)
        self._events()
        self._stacks()
        write_tree(
            self.job_dir,
            **{
                "slurm.sh": f"#!/bin/bash\n# {HOSTILE}\nexec python\n",
                "code.diff": f"--- a/train.py\n+++ b/train.py\n+{HOSTILE}\n",
            },
        )
        verdict = self.verdict() if self.ended else None
        if verdict is not None:
            ends.write_result(self.job_dir, verdict)
        return Record(
            self.job_id,
            "train",
            cluster="gpu-cluster",
            backend="local",
            job_dir=self.job_dir,
            nodes=self.nodes,
            submitted_at="2026-11-24T10:00:00.000Z",
            spec={
                "program": {"kind": "script", "target": "train.py", "args": ["--lr", HOSTILE]},
                "workdir": "/home/user/project",
                "python": "/usr/bin/python3",
                "secret": [{"name": "WANDB_API_KEY"}],
                "env": {"OMP_NUM_THREADS": "4"},
                "resources": {"nodes": self.nodes, "gpus_per_node": self.per_node, "mem": None},
                "launcher": "agent",
            },
            end=None if verdict is None else verdict.to_json(),
            code={
                "git": {
                    "revision": "0123456789abcdef0123456789abcdef01234567",
                    "branch": "main",
                    "changed": ["train.py"],
                    "complete": True,
                    "diff": "code.diff",
                }
            },
        )

    def verdict(self) -> Verdict:
        times = {"started_at": "2026-11-24T10:00:20.000Z", "ended_at": "2026-11-25T10:00:00.000Z"}
        if self.failed is None:
            return Verdict(JobState.SUCCEEDED, 0, restarts=self.restarts, **times)
        root = self._failure(self.failed, effect=False)
        others = [rank for rank in range(self.world) if rank != self.failed]
        return Verdict(
            JobState.FAILED,
            1,
            reason=f"{root.who}: {root.message}",
            failure=root,
            consequences=tuple(self._failure(rank, effect=True) for rank in others),
            restarts=self.restarts,
            **times,
        )

    def _failure(self, rank: int, *, effect: bool) -> Failure:
        node = rank // self.per_node
        return Failure(
            rank,
            rank % self.per_node,
            node_rank=node,
            host=f"gpu{node}",
            exit_code=1,
            signal=None,
            message="RuntimeError: Connection closed by peer" if effect
            else f"ValueError: loss is nan {HOSTILE}",
            last_lines=() if effect else tuple(_TRACEBACK.split("\n")),
            effect=effect,
            kind=FailureKind.NETWORK if effect else FailureKind.CODE,
        )  # fmt: skip

    def _base(self, node: int) -> float:
        return 1000.0 + 77_777.0 * node  # the monotonic clocks of hosts differ

    def _phases(self, node: int) -> None:
        log = PhaseLog(self.job_dir, node)
        base = self._base(node)

        def add(
            phase: Phase, at: float, rank: int | None = None, restart: int = 0, detail=""
        ) -> None:
            begin = PhaseBegin(
                phase, rank, restart=restart, attempt=0, time=1.7e9 + at, monotonic=base + at,
                detail=detail,
            )  # fmt: skip
            log.add(begin)

        add(Phase.SETUP, 0.0)
        add(Phase.IMPORT, 4.0)
        add(Phase.RENDEZVOUS, 9.0)
        rounds = self.restarts + 1
        ranks = range(node * self.per_node, (node + 1) * self.per_node)
        for restart in range(rounds):
            begin = 12.0 + restart * (self.seconds - 20) / rounds
            end = 12.0 + (restart + 1) * (self.seconds - 20) / rounds - 6
            add(Phase.RUNNING, begin, restart=restart)
            for rank in ranks:
                add(Phase.IMPORT, begin, rank, restart)
                add(Phase.RENDEZVOUS, begin + 3 + rank % 5 * 0.7, rank, restart)
                add(Phase.INIT, begin + 7, rank, restart)
                add(Phase.RUNNING, begin + 9, rank, restart)
            if not self.ended and restart == rounds - 1:
                return
            for rank in ranks:
                if rank == self.failed:
                    add(Phase.ENDED, end, rank, restart, "exit code 1")
                    continue
                if self.failed is not None:
                    add(Phase.STOP, end + 0.5, rank, restart)
                add(Phase.ENDED, end + 3, rank, restart, "" if self.failed is None else "SIGTERM")

    def _metrics(self, node: int) -> None:
        rng = random.Random(node)
        facts = NodeFacts(
            node,
            f"gpu{node}",
            attempt=0,
            cores=64,
            memory=512 * GIB,
            gpus=tuple(
                Gpu(index, f"GPU-{index}", "NVIDIA H100", 80 * GIB)
                for index in range(self.per_node if self.gpus else 0)
            ),
        )
        writer = SampleWriter(self.job_dir, node)
        ranks = range(node * self.per_node, (node + 1) * self.per_node)
        count = int((self.seconds - 20) / self.interval)
        for index in range(count):
            at = 12.0 + index * self.interval
            wave = 0.5 + 0.5 * math.sin(index / max(20.0, count / 40))
            workers = tuple(
                WorkerSample(
                    rank,
                    (20 if rank == self.failed and index > count * 0.7 else 95 + 40 * wave)
                    + rng.random() * 10,
                    int((4 + wave + rank % 3) * GIB),
                    read=rng.random() * 5e7,
                    written=0.0,
                    threads=12,
                    step=500.0,
                    waited=30.0 if rank == self.failed else 300.0 + 10 * (rank % 5),
                )
                for rank in ranks
            )
            gpus = tuple(
                GpuSample(
                    8.0 if rank == self.failed and index > count * 0.7 else 70 + 25 * wave,
                    int((40 + 20 * wave) * GIB),
                    power=300.0,
                )
                for rank in (ranks if self.gpus else ())
            )
            writer.add(
                facts,
                Sample(
                    1.7e9 + at,
                    self._base(node) + at,
                    restart=0,
                    quiet=2.0,
                    cpu=sum(worker.cpu for worker in workers) + 30,
                    memory=sum(worker.rss for worker in workers) + 9 * GIB,
                    load=8.0,
                    received=1e8 * wave + rng.random() * 1e7,
                    sent=1e8 * wave,
                    read=1e6,
                    written=0.0,
                    workers=workers,
                    gpus=gpus,
                ),
            )

    def _usage(self, node: int) -> dict[str, object]:
        gpu = {
            "seconds": self.seconds, "idle": self.seconds / 10, "mean": 83.0, "peak": 95.0,
            "memory": 60 * GIB,
        }  # fmt: skip
        return {
            "wall": self.seconds, "waited": 4.0, "startup": 12.0, "restarts": self.restarts,
            "restart_seconds": 9.0 * self.restarts, "host": f"gpu{node}", "cores": 64,
            "memory": 512 * GIB, "seconds": self.seconds, "cpu_seconds": self.seconds * 9,
            "cpu_peak": 11.5, "memory_mean": 40 * GIB, "memory_peak": 45 * GIB, "ranks": {},
            "gpus": [gpu] * self.per_node if self.gpus else [],
        }  # fmt: skip

    def _logs(self, node: int) -> None:
        directory = node_directory(self.job_dir, node)
        for rank in range(node * self.per_node, (node + 1) * self.per_node):
            lines = [f"step {step} loss {step * 37 % 100} {HOSTILE}" for step in range(30)]
            lines.append(f"rank {rank} of {self.world}")
            (directory / f"rank{rank}.out").write_text("\n".join(lines) + "\n")
            if rank == self.failed:
                (directory / f"rank{rank}.err").write_text(_TRACEBACK + "\n")

    def _events(self) -> None:
        base = self._base(0)
        events: list[dict[str, object]] = [
            {"monotonic": base + 8, "event": "joined", "node_rank": node, "host": f"gpu{node}"}
            for node in range(self.nodes)
        ]
        events.append({"monotonic": base + 12, "event": "started", "attempt": 0, "restart": 0})
        for restart in range(self.restarts):
            at = 12.0 + (restart + 1) * (self.seconds - 20) / (self.restarts + 1) - 2
            why = f"rank {self.failed}: {HOSTILE}"
            events.append({"monotonic": base + at, "event": "restart", "why": why})
        if self.failed is not None:
            slow = Straggler(
                self.failed, self.failed // self.per_node, HOSTILE, waited_s=0.27, step_s=0.5
            )
            at = base + self.seconds - 20
            events.append({"monotonic": at, "event": "straggling", **vars(slow)})
        if self.ended:
            at = base + self.seconds - 8
            state = "SUCCEEDED" if self.failed is None else "FAILED"
            events.append({"monotonic": at, "event": "ended", "state": state})
        text = "".join(json.dumps(event) + "\n" for event in events)
        (self.job_dir / "events.jsonl").write_text(text)

    def _stacks(self) -> None:
        def frames(names: str) -> list[dict[str, object]]:
            return [
                {"file": "/home/user/project/train.py", "line": 40 + index, "function": name}
                for index, name in enumerate(names.split())
            ]

        ranks = [
            {
                "rank": rank,
                "node_rank": rank // self.per_node,
                "host": f"gpu{rank // self.per_node}",
                "pid": 100 + rank,
                "state": "sleeps (futex_wait)",
                "answered": True,
                "threads": [
                    {
                        "name": "MainThread",
                        "frames": frames(
                            f"decode {HOSTILE[:25]} next main"
                            if rank == self.failed
                            else "all_reduce backward step main"
                        ),
                    }
                ],
            }
            for rank in range(self.world)
        ]
        value = {"schema": 1, "id": self.job_id, "ranks": ranks, "why": "a hang", "time": "10:00"}
        path = node_directory(self.job_dir, 0) / "stacks.json"
        path.write_text(json.dumps(value))


_TRACEBACK = f"""Traceback (most recent call last):
  File "train.py", line 41, in <module>
    main()
  File "train.py", line 30, in main
    raise ValueError("loss is nan {HOSTILE}")
ValueError: loss is nan"""


def page_of(job: WrittenJob) -> str:
    """Write a job and return its report."""
    from clusterjob.backends.base import Status
    from clusterjob.backends.shared import ended
    from clusterjob.insight.report import page, values
    from clusterjob.insight.report.gather import gather
    from clusterjob.insight.report.make import stacks_of

    record = job.write()
    verdict = record.verdict
    now = Status(JobState.RUNNING) if verdict is None else ended(verdict)
    data = gather(record, now, stacks_of(record) if verdict is not None else None)
    return page.render(lambda detail: values.of_job(data, detail))
