"""The phases of a node and of its ranks, as the node's agent records them.

Each line of ``logs/node<k>/phases.jsonl`` is the begin of a phase. A line without a rank belongs to
the node.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from clusterjob.node.logs.events import read_events
from clusterjob.node.logs.job_dir import PHASES
from clusterjob.node.logs.log_files import node_directory
from clusterjob.node.system.files import Appender

_MAX_BYTES = 16 << 20  # to read of a file: the phases of hundreds of rounds


class Phase(str, Enum):
    """A phase of a node, or of a rank. The next phase ends it."""

    SETUP = "setup"  # node: the script's setup lines run
    IMPORT = "import"  # node: the forkserver imports torch; rank: the program runs, before init
    RENDEZVOUS = "rendezvous"  # node: the agent joins the others; rank: it waits for others
    INIT = "init"  # rank: torch forms the process group
    RUNNING = "running"  # node: all workers run; rank: its group is formed, or it needs none
    STOP = "stop"  # the workers are being stopped
    ENDED = "ended"  # rank: the process has ended; node: all have

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class PhaseBegin:
    """The begin of a phase.

    Attributes:
        phase: the phase.
        rank: the rank; None for the node.
        restart, attempt: the round and the attempt.
        time: seconds since the epoch, by the node's clock; for display only.
        monotonic: seconds of the node's monotonic clock.
        detail: one short text, such as the exit code; empty without one.
    """

    phase: Phase
    rank: int | None
    restart: int
    attempt: int
    time: float
    monotonic: float
    detail: str = ""


class PhaseLog:
    """Append the begins of phases to a node's file; a full disk loses them."""

    def __init__(self, job_dir: Path, node_rank: int) -> None:
        self._file = Appender(node_directory(job_dir, node_rank) / PHASES)

    def add(self, *begins: PhaseBegin) -> None:
        """Append begins of phases in one write.

        Raises:
            OSError: they cannot be written.
        """
        lines = (
            {name: value for name, value in vars(begin).items() if value not in (None, "")}
            for begin in begins
        )
        text = "".join(json.dumps(line) + "\n" for line in lines)
        if text:
            self._file.write(text.encode())


def read_phases(job_dir: Path, node_rank: int) -> Iterator[PhaseBegin]:
    """Yield the begins of phases of a node, in the order of the file; skip malformed lines."""
    for event in read_events(node_directory(job_dir, node_rank) / PHASES, _MAX_BYTES):
        try:
            rank = event.get("rank")
            yield PhaseBegin(
                Phase(event["phase"]),
                None if rank is None else int(rank),
                restart=int(event["restart"]),
                attempt=int(event["attempt"]),
                time=float(event["time"]),
                monotonic=float(event["monotonic"]),
                detail=str(event.get("detail", ""))[:200],
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
