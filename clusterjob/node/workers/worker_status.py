"""What an agent knows of its workers and tells node 0: where those are that others wait for, and
which left with exit code 0.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterjob.node.contract import World
from clusterjob.node.logs import log_files
from clusterjob.node.workers.sightings import Sighting
from clusterjob.node.workers.worker_failures import Failures

_MOST_EXITS = 8  # of ranks that ended with exit code 0, in one answer


@dataclass
class WorkerStatus:
    """The workers of one node in one round.

    Attributes:
        node_rank, host: which node it is.
        directory: of its logs.
        attempt: which start of the job this is.
        failures: makes failures of them.
        world: the round; None before the first.
        ended: how each worker ended that has, by local rank.
    """

    node_rank: int
    host: str
    directory: Path
    attempt: int
    failures: Failures
    world: World | None = None
    ended: dict[int, str] = field(default_factory=dict)
    _exits: dict[int, float] = field(
        default_factory=dict
    )  # when those with exit code 0 ended, by the monotonic clock

    def begin(self, world: World) -> None:
        """Forget the last round."""
        self.world = world
        self.ended.clear()
        self._exits.clear()

    def note_exit(self, local_rank: int, monotonic: float) -> None:
        """Note that a worker has ended with exit code 0."""
        self._exits[local_rank] = monotonic

    def exits(self) -> dict[str, Any]:
        """Return the message that names the workers which ended with exit code 0, the first ones of
        many.
        """
        assert self.world is not None
        moment, exits = time.monotonic(), []
        for local_rank, at in sorted(self._exits.items(), key=lambda item: item[1])[:_MOST_EXITS]:
            failure = self.failures.of_worker(self.world, local_rank, 0, None, "")
            exits.append({"failure": failure.to_json(), "age": max(0.0, moment - at)})
        return {"t": "checked", "restart": self.world.restart, "exits": exits}

    def known(self, wanted: Sequence[int], *, started: bool) -> list[Sighting]:
        """Return what can be said of workers that do not run: they were not started so far, or have
        ended.

        Args:
            wanted: their local ranks.
            started: whether this node's workers were started.
        """
        found = [
            self.sighting(rank, None, text="was not started: its node imports torch so far")
            for rank in wanted
            if not started
        ]
        ended = [rank for rank in wanted if rank in self.ended]
        return found + [
            self.sighting(rank, None, text=f"{self.ended[rank]} and never came to the roll-call")
            for rank in ended
        ]

    def sighting(
        self, local_rank: int, pid: int | None, text: str, stack: Sequence[str] = ()
    ) -> Sighting:
        """Return what is known of one worker."""
        assert self.world is not None
        return Sighting(
            self.world.first_rank + local_rank, local_rank, pid=pid, text=text, stack=tuple(stack)
        )

    def where(self, found: Sequence[Sighting], *, final: bool) -> dict[str, Any]:
        """Return the message that says where workers are.

        Args:
            found: what is known of them.
            final: whether those who wait for them give up now.
        """
        assert self.world is not None
        failures = []
        for each in found if final else ():
            last = log_files.last_lines(
                log_files.rank_files(
                    self.directory, each.rank, restart=self.world.restart, attempt=self.attempt
                )[1]
            )
            failures.append(each.failure(self.node_rank, self.host, last).to_json())
        lines = [each.line(self.node_rank, self.host) for each in found]
        return {
            "t": "where",
            "restart": self.world.restart,
            "final": final,
            "lines": lines,
            "failures": failures,
        }

    def note_found(self, local_rank: int, lines: Sequence[str]) -> None:
        """Tell a worker's own readers, in its stderr, what has become of those for which it waits."""
        if self.world is not None:
            rank = self.world.first_rank + local_rank
            log_files.append(
                log_files.rank_files(
                    self.directory, rank, restart=self.world.restart, attempt=self.attempt
                )[1],
                lines,
            )
