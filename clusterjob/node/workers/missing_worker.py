"""Describe a worker that other ranks wait for: one line, and its failure once they give up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clusterjob.node.verdict import Failure, FailureKind

_MAX_LAST_LINES = 20


@dataclass(frozen=True)
class MissingWorker:
    """The state of one worker that other ranks wait for.

    Attributes:
        rank, local_rank: the worker.
        pid: its process id; None if it does not run.
        text: its current activity, or how it ended.
        stack: its main thread's frames, innermost first.
    """

    rank: int
    local_rank: int
    pid: int | None
    text: str
    stack: Sequence[str] = ()

    def line(self, node_rank: int, host: str) -> str:
        """Return the line for the log."""
        process = f", pid {self.pid}" if self.pid is not None else ""
        return (
            f"rank {self.rank} (node {node_rank}, local rank {self.local_rank},"
            f" host {host}{process}): {self.text}"
        )

    def failure(self, node_rank: int, host: str, last_lines: Sequence[str]) -> Failure:
        """Return the failure that made the other ranks give up.

        Args:
            node_rank: the worker's node.
            host: that node's name.
            last_lines: the end of the worker's stderr, used if there is no stack.
        """
        process = f" (pid {self.pid})" if self.pid is not None else ""
        message = f"the others gave up waiting for it{process}: it {self.text}"
        shown = (
            ("Its stack (most recent call first):", *self.stack)[:_MAX_LAST_LINES]
            if self.stack
            else tuple(last_lines)
        )
        return Failure(
            self.rank,
            self.local_rank,
            node_rank=node_rank,
            host=host,
            exit_code=1,
            signal=None,
            message=message,
            last_lines=shown,
            kind=FailureKind.RENDEZVOUS,
        )
