"""Describe the workers of a node that other ranks wait for, or that ended with exit code 0."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from clusterjob.node.contract import World
from clusterjob.node.logs import log_files
from clusterjob.node.verdict import Failure, FailureKind
from clusterjob.node.workers.forkserver_messages import ProbedWorker
from clusterjob.node.workers.worker_failures import Failures

_MAX_EXITS = 8  # maximum ranks with exit code 0 that one message names
_MAX_LAST_LINES = 20


@dataclass
class WorkerStatus:
    """The workers of one node in one round.

    Attributes:
        failures: makes the failures of this node's workers.
        world: the round.
        ended: the end of each ended worker, by local rank.
        exits: the monotonic time of each end with exit code 0, by local rank.
    """

    failures: Failures
    world: World
    ended: dict[int, str] = field(default_factory=dict)
    exits: dict[int, float] = field(default_factory=dict)

    def early_exits(self) -> list[tuple[Failure, float]]:
        """Return the first 8 workers that ended with exit code 0, each with its age in seconds."""
        moment, first = time.monotonic(), sorted(self.exits.items(), key=lambda item: item[1])
        return [
            (
                self.failures.of_worker(self.world, local_rank, 0, signal_name=None, message=""),
                max(0.0, moment - at),
            )
            for local_rank, at in first[:_MAX_EXITS]
        ]

    def known(self, wanted: Sequence[int], *, started: bool) -> list[ProbedWorker]:
        """Describe workers that do not run: they have not been started yet, or have ended.

        Args:
            wanted: the local ranks of the workers.
            started: whether this node's workers were started.
        """
        texts = (
            {}
            if started
            else dict.fromkeys(wanted, "was not started: its node still imports torch")
        )
        texts |= {
            rank: f"{self.ended[rank]} and never joined the rendezvous"
            for rank in wanted
            if rank in self.ended
        }
        return [ProbedWorker(rank, None, text=text, stack=()) for rank, text in texts.items()]

    def line(self, worker: ProbedWorker) -> str:
        """Return one line about a worker that other ranks wait for."""
        process = f", pid {worker.pid}" if worker.pid is not None else ""
        return (
            f"rank {self.world.first_rank + worker.local_rank} (node {self.failures.node_rank},"
            f" local rank {worker.local_rank}, host {self.failures.host}{process}): {worker.text}"
        )

    def missing_failure(self, worker: ProbedWorker) -> Failure:
        """Return the failure of a worker for which other ranks gave up waiting."""
        process = f" (pid {worker.pid})" if worker.pid is not None else ""
        if worker.stack:
            last = ("Its stack (most recent call first):", *worker.stack)[:_MAX_LAST_LINES]
        else:
            last = log_files.last_lines(self.failures.stderr_of(self.world, worker.local_rank))
        return Failure(
            self.world.first_rank + worker.local_rank,
            worker.local_rank,
            node_rank=self.failures.node_rank,
            host=self.failures.host,
            exit_code=1,
            signal=None,
            message=f"the others gave up waiting for it{process}: it {worker.text}",
            last_lines=last,
            kind=FailureKind.RENDEZVOUS,
        )
