"""The state with which another process goes on as the coordinator of a job."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from clusterjob.node.logs.job_dir import COORDINATOR
from clusterjob.node.system import files, processes
from clusterjob.node.system.codec import Limit
from clusterjob.node.verdict import RoundEnd

_MAX_NUMBER = 2**31 - 1
_MAX_SECONDS = 1e9
_MAX_TEXT = 300  # characters
_MAX_NODES = 1 << 14
# One of them must be alive. A message to each agent names them all.
MAX_SUCCESSORS = 8


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
        members: the number of nodes that were alive when the round began.
        wanted: the number of nodes of a round, if there are enough.
        nodes: the nodes of the round, in the order of their ranks.
        avoided: the nodes that caused failures, the latest last.
        addresses: where the next coordinator may listen.
        clock: the time of the state, by the clock of the job's events.
        made_at: the time of the state, by the monotonic clock of the machine.
        boot_id: the boot of the machine, to which `made_at` belongs.
    """

    attempt: int
    restarts: int
    started_at: str
    seconds_left: float | None
    limit_runs: bool
    node: int
    host: str
    moves: int
    members: int
    wanted: int
    nodes: tuple[int, ...]
    avoided: tuple[int, ...]
    addresses: tuple[str, ...]
    clock: float
    made_at: float
    boot_id: str

    @property
    def deadline(self) -> float:
        """The time limit, by the monotonic clock of this machine; infinity without one.

        On another machine, the time between the state and this call does not count.
        """
        if self.seconds_left is None:
            return math.inf
        same = self.boot_id == processes.boot_id()
        return (self.made_at if same else time.monotonic()) + self.seconds_left

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> CoordinatorState:
        """Return the state that `to_json` wrote; ignore unknown keys.

        Raises:
            ValueError: a key is missing or has a wrong value.
        """
        if not isinstance(data, Mapping):
            raise ValueError("not an object")  # noqa: TRY004 - one exception type
        left = data.get("seconds_left")
        return cls(
            _count(data, "attempt"),
            _count(data, "restarts"),
            started_at=_text(data, "started_at"),
            seconds_left=None if left is None else _seconds(data, "seconds_left"),
            limit_runs=data.get("limit_runs") is True,
            node=_count(data, "node"),
            host=_text(data, "host"),
            moves=_count(data, "moves"),
            members=_count(data, "members"),
            wanted=_count(data, "wanted"),
            nodes=_counts(data, "nodes"),
            avoided=_counts(data, "avoided"),
            addresses=_texts(data, "addresses"),
            clock=_seconds(data, "clock"),
            made_at=_seconds(data, "made_at"),
            boot_id=_text(data, "boot_id"),
        )


@dataclass(frozen=True)
class Successor:
    """A node that may become the coordinator."""

    node: Annotated[int, Limit((1 << 24) - 1)]
    address: Annotated[str, Limit(300)]


@dataclass(frozen=True)
class Succession:
    """The nodes that may become the coordinator, in the order of their turns.

    Attributes:
        state: the coordinator's state; None for an agent that is no successor.
        rounds: the rounds that have ended; empty for an agent that is no successor.
    """

    successors: Annotated[tuple[Successor, ...], Limit(MAX_SUCCESSORS)]
    state: CoordinatorState | None = None
    rounds: Annotated[tuple[RoundEnd, ...], Limit(256)] = ()


def write(job_dir: Path, state: CoordinatorState) -> None:
    """Write the state; an error such as a full disk leaves the state of an earlier round."""
    with contextlib.suppress(OSError):
        files.write_json(job_dir / COORDINATOR, state.to_json())


def remove(job_dir: Path) -> None:
    """Remove the state of a job that has ended."""
    with contextlib.suppress(OSError):
        (job_dir / COORDINATOR).unlink(missing_ok=True)


def read(job_dir: Path, attempt: int) -> CoordinatorState | None:
    """Return the state of this attempt; None if no round of it was started."""
    try:
        state = CoordinatorState.from_json(files.read_json(job_dir / COORDINATOR))
    except (OSError, ValueError):
        return None
    return state if state.attempt == attempt else None


def _count(data: Mapping[str, Any], name: str) -> int:
    value = data.get(name)
    if type(value) is not int or not 0 <= value <= _MAX_NUMBER:
        raise ValueError(f"{name} is not a count")
    return value


def _counts(data: Mapping[str, Any], name: str) -> tuple[int, ...]:
    values = data.get(name)
    if not isinstance(values, (list, tuple)) or len(values) > _MAX_NODES:
        raise ValueError(f"{name} is not a list of nodes")
    return tuple(_count({name: value}, name) for value in values)


def _texts(data: Mapping[str, Any], name: str) -> tuple[str, ...]:
    values = data.get(name)
    if not isinstance(values, (list, tuple)) or len(values) > MAX_SUCCESSORS:
        raise ValueError(f"{name} is not a short list")
    return tuple(_text({name: value}, name) for value in values)


def _seconds(data: Mapping[str, Any], name: str) -> float:
    value = data.get(name)
    if not isinstance(value, (int, float)) or not abs(value) <= _MAX_SECONDS:
        raise ValueError(f"{name} is not a number of seconds")
    return float(value)


def _text(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise ValueError(f"{name} is not a short text")
    return value
