"""Describe workers that other ranks wait for, and workers that ended with exit code 0."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clusterjob.node.contract import World
from clusterjob.node.logs import log_files
from clusterjob.node.verdict import Failure
from clusterjob.node.workers.missing_worker import MissingWorker
from clusterjob.node.workers.worker_failures import Failures

_MAX_EXITS = 8  # maximum ranks with exit code 0 that one message names


@dataclass
class WorkerStatus:
    """The workers of one node in one round.

    Attributes:
        node_rank, host: the node.
        directory: the directory of its logs.
        attempt: the number of the job's attempt, from 0.
        failures: makes the failures of this node's workers.
        world: the current round; None before the first round.
        ended: the end of each ended worker, by local rank.
    """

    node_rank: int
    host: str
    directory: Path
    attempt: int
    failures: Failures
    world: World | None = None
    ended: dict[int, str] = field(default_factory=dict)
    # Local rank -> monotonic time of an end with exit code 0.
    _exits: dict[int, float] = field(default_factory=dict)

    def begin(self, world: World) -> None:
        """Begin a round: drop the workers of the previous round."""
        self.world = world
        self.ended.clear()
        self._exits.clear()

    def note_exit(self, local_rank: int, monotonic: float) -> None:
        """Record that a worker has ended with exit code 0."""
        self._exits[local_rank] = monotonic

    def early_exits(self) -> list[tuple[Failure, float]]:
        """Return the first 8 workers that ended with exit code 0, each with its age in seconds."""
        assert self.world is not None
        moment, first = time.monotonic(), sorted(self._exits.items(), key=lambda item: item[1])
        return [
            (
                self.failures.of_worker(self.world, local_rank, 0, signal_name=None, message=""),
                max(0.0, moment - at),
            )
            for local_rank, at in first[:_MAX_EXITS]
        ]

    def known(self, wanted: Sequence[int], *, started: bool) -> list[MissingWorker]:
        """Describe workers that do not run: they have not been started yet, or have ended.

        Args:
            wanted: the local ranks of the workers.
            started: whether this node's workers were started.
        """
        found = [
            self.describe(rank, None, text="was not started: its node still imports torch")
            for rank in wanted
            if not started
        ]
        ended = [rank for rank in wanted if rank in self.ended]
        return found + [
            self.describe(rank, None, text=f"{self.ended[rank]} and never joined the rendezvous")
            for rank in ended
        ]

    def describe(
        self, local_rank: int, pid: int | None, text: str, stack: Sequence[str] = ()
    ) -> MissingWorker:
        """Return the description of one worker."""
        assert self.world is not None
        return MissingWorker(
            self.world.first_rank + local_rank, local_rank, pid=pid, text=text, stack=tuple(stack)
        )

    def lines(self, found: Sequence[MissingWorker]) -> tuple[str, ...]:
        """Return one line about each worker that other ranks wait for."""
        return tuple(each.line(self.node_rank, self.host) for each in found)

    def missing_failures(self, found: Sequence[MissingWorker]) -> tuple[Failure, ...]:
        """Return the failures of workers for which other ranks gave up waiting."""
        return tuple(
            each.failure(self.node_rank, self.host, log_files.last_lines(self._stderr(each.rank)))
            for each in found
        )

    def note_found(self, local_rank: int, lines: Sequence[str]) -> None:
        """Append lines about the ranks that a worker waits for to that worker's stderr file."""
        if self.world is not None:
            log_files.append(self._stderr(self.world.first_rank + local_rank), lines)

    def _stderr(self, rank: int) -> Path:
        assert self.world is not None
        return log_files.rank_files(
            self.directory, rank, restart=self.world.restart, attempt=self.attempt
        )[1]
