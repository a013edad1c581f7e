"""The state with which another process goes on as the coordinator of a job."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from clusterjob.node.logs.job_dir import COORDINATOR
from clusterjob.node.system import files, processes
from clusterjob.node.system.codec import Codec, Limit, MalformedMessageError
from clusterjob.node.verdict import RoundEnd

# One of them must be alive. A message to each agent names them all.
MAX_SUCCESSORS = 8
_Node = Annotated[int, Limit((1 << 24) - 1)]
_Nodes = Annotated[tuple[_Node, ...], Limit(1 << 14)]
_Text = Annotated[str, Limit(300)]


@dataclass(frozen=True)
class CoordinatorState:
    """What the coordinator keeps from round to round.

    Attributes:
        attempt: the number of the job's attempt, from 0.
        restarts: the number of the round that was started last.
        started_at: when the first workers were started, RFC 3339.
        seconds_left: seconds until the time limit when the state was made; None without a limit.
        limit_runs: whether the time limit runs: all workers of a round have run.
        node, host: the coordinator's node.
        moves: how often the coordinator has moved to another node.
        process: the first process of the coordinator's node; see `processes.identity`.
        members: the nodes that were alive when the round began.
        before, before_node: the members of the last round that all its members have seen, and its
            coordinator; empty and `node` if this is that round.
        nodes: the nodes of the round, in the order of their ranks.
        avoided: the nodes that caused failures, the latest last.
        addresses: where the next coordinator may listen.
        clock: the time of the state, by the clock of the job's events.
        made_at: the time of the state, by the monotonic clock of the machine.
        boot_id: the boot of the machine, to which `made_at` belongs.
    """

    attempt: int
    restarts: int
    started_at: _Text
    seconds_left: float | None
    limit_runs: bool
    node: _Node
    host: _Text
    moves: int
    process: _Text
    members: _Nodes
    before: _Nodes
    before_node: _Node
    nodes: _Nodes
    avoided: _Nodes
    addresses: Annotated[tuple[_Text, ...], Limit(MAX_SUCCESSORS)]
    clock: float
    made_at: float
    boot_id: _Text

    @property
    def deadline(self) -> float:
        """The time limit, by the monotonic clock of this machine; infinity without one.

        On another machine, the time between the state and this call does not count.
        """
        if self.seconds_left is None:
            return math.inf
        same = self.boot_id == processes.boot_id()
        return (self.made_at if same else time.monotonic()) + self.seconds_left


@dataclass(frozen=True)
class Successor:
    """A node that may become the coordinator."""

    node: _Node
    address: _Text


@dataclass(frozen=True)
class Succession:
    """The nodes that may become the coordinator, in the order of their turns.

    Attributes:
        rounds_seen: the number of the round, plus 1.
        state: the coordinator's state; None for an agent that is no successor.
        rounds: the rounds that have ended; empty for an agent that is no successor.
    """

    successors: Annotated[tuple[Successor, ...], Limit(MAX_SUCCESSORS)]
    rounds_seen: Annotated[int, Limit((1 << 31) - 1)]
    state: CoordinatorState | None = None
    rounds: Annotated[tuple[RoundEnd, ...], Limit(256)] = ()


_CODEC = Codec(CoordinatorState)


def write(job_dir: Path, state: CoordinatorState) -> None:
    """Write the state.

    Raises:
        OSError: the disk is full, for example; the state of an earlier round is left.
    """
    files.write_json(job_dir / COORDINATOR, _CODEC.encode(state))


def remove(job_dir: Path) -> None:
    """Remove the state of a job that has ended."""
    with contextlib.suppress(OSError):
        (job_dir / COORDINATOR).unlink(missing_ok=True)


def read(job_dir: Path, attempt: int) -> CoordinatorState | None:
    """Return the state of this attempt; None if no round of it was started."""
    try:
        state = _CODEC.decode(files.read_json(job_dir / COORDINATOR))
    except (OSError, MalformedMessageError):
        return None
    return state if state.attempt == attempt else None
