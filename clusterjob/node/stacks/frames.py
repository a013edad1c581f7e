"""The stacks of workers as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Frame:
    """One frame of a thread.

    Attributes:
        file: the path of the source file, as the interpreter knows it.
        line: the line number; None if the interpreter does not know it.
        function: the name of the function.
    """

    file: str
    line: int | None
    function: str


@dataclass(frozen=True)
class ThreadStack:
    """The stack of one thread; the innermost frame is first."""

    name: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class RankStack:
    """The stacks of all threads of one rank.

    Attributes:
        rank, node_rank, host, pid: the worker.
        state: the kernel's state of the process, such as ``sleeps (futex_wait)``.
        answered: whether the process itself has answered.
        threads: its threads, the main thread first; empty without an answer.
    """

    rank: int
    node_rank: int
    host: str
    pid: int
    state: str
    answered: bool
    threads: tuple[ThreadStack, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the stack as plain data."""
        return {
            "rank": self.rank,
            "node_rank": self.node_rank,
            "host": self.host,
            "pid": self.pid,
            "state": self.state,
            "answered": self.answered,
            "threads": [
                {"name": thread.name, "frames": [vars(frame) for frame in thread.frames]}
                for thread in self.threads
            ],
        }
