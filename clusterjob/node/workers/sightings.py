"""What an agent tells of workers for which others wait: one line each, and the failure that it is
once they give up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterjob.node.verdict import Failure

_MOST_NAMED = 8  # ranks of which one question asks
_MOST_LAST_LINES = 20


@dataclass(frozen=True)
class Sighting:
    """What is known of one worker.

    Attributes:
        rank, local_rank: the worker.
        pid: its process; None while there is none.
        text: what it does, or how it ended.
        stack: its main thread's frames, innermost first.
    """

    rank: int
    local_rank: int
    pid: int | None
    text: str
    stack: Sequence[str] = ()

    def line(self, node_rank: int, host: str) -> str:
        """Return it for people."""
        process = f", pid {self.pid}" if self.pid is not None else ""
        return f"rank {self.rank} (node {node_rank}, local rank {self.local_rank}, host {host}{process}): {self.text}"

    def failure(self, node_rank: int, host: str, last_lines: Sequence[str]) -> Failure:
        """Return it as the reason why the others gave up.

        Args:
            node_rank: the worker's node.
            host: that node's name.
            last_lines: the end of the worker's stderr, for one that shows no stack.
        """
        process = f" (pid {self.pid})" if self.pid is not None else ""
        message = f"the others gave up waiting for it{process}: it {self.text}"
        shown = (
            ("Its stack (most recent call first):", *self.stack)[:_MOST_LAST_LINES]
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
        )


def wanted(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a worker's question after others, as a message; None if this report is none. What is
    no question raises ValueError.
    """
    if "missing" not in report:
        return None
    ranks = report["missing"]
    if not isinstance(ranks, list) or not all(type(rank) is int and rank >= 0 for rank in ranks):
        raise ValueError("not a list of ranks")
    return {
        "t": "missing",
        "local_rank": int(report["local_rank"]),
        "ranks": ranks[:_MOST_NAMED],
        "final": report.get("final") is True,
    }
