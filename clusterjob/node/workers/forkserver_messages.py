"""The messages between an agent, its forkserver and its workers.

Agent and forkserver exchange one message per packet of a socket pair. Workers write to the
forkserver's report pipe, one message per line (`torch_patches.send`). `Stop` and `Missing` are also
parts of what agent and coordinator exchange.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

from clusterjob.node.contract import World
from clusterjob.node.states import Missing, Stop
from clusterjob.node.system.codec import Codec, Limit
from clusterjob.node.verdict import FailureKind

MESSAGE_BYTES = 1 << 17  # maximum of one message; SOCK_SEQPACKET keeps message boundaries
_MAX_TEXT, _MAX_WHERE = 900, 300  # characters of a failure; see `torch_patches.fail`
# Maximum bytes of one reading: the largest size of a pipe (pipe-max-size, proc(5)).
_MAX_READ = 1 << 20

# -- from the agent ------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartRound:
    """Start one round of workers; the packet may carry the socket of torch's store.

    Attributes:
        variables: environment variables of all workers.
    """

    world: World
    variables: dict[str, str]


@dataclass(frozen=True)
class WarnWorkers:
    """Warn the workers of this round and of all later rounds that a preemption is near."""


@dataclass(frozen=True)
class ReportEnds:
    """Report every worker that has ended by now, then answer `EndsReported`."""


@dataclass(frozen=True)
class Quit:
    """Stop the workers, then exit."""


# -- from a worker; the forkserver forwards these messages ---------------------------------------


@dataclass(frozen=True)
class WorkerFailing:
    """A worker fails, or cannot be started.

    Attributes:
        monotonic: the time of the failure, by the monotonic clock of the node.
        message: the error, one line.
        exit_code: the exit code that the worker will have.
        kind: the kind; None if the worker cannot determine it.
        started: False if the worker was never started.
        where: the file and line that raised the exception; empty if unknown.
    """

    local_rank: int
    monotonic: float
    message: Annotated[str, Limit(_MAX_TEXT, cuts=True)]
    exit_code: Annotated[int, Limit(255)]
    kind: FailureKind | None = None
    started: bool = True
    where: Annotated[str, Limit(_MAX_WHERE, cuts=True)] = ""


@dataclass(frozen=True)
class WorkerAlive:
    """A worker has called ``ctx.heartbeat()``; `step` is -1 if it gave none."""

    local_rank: int
    step: Annotated[int, Limit(2**62, minimum=-1)]


@dataclass(frozen=True)
class WorkerPhase:
    """A phase of a worker begins.

    Attributes:
        phase: a value of `clusterjob.node.logs.events.Phase`.
        monotonic: the time of its begin, by the monotonic clock of the node.
    """

    local_rank: int
    phase: Annotated[str, Limit(20)]
    monotonic: float


@dataclass(frozen=True)
class WorkerWaits:
    """How long a worker has waited in collectives lately.

    Attributes:
        step: the mean length of a step, in seconds.
        waited: the mean wait in a step.
    """

    local_rank: int
    step: float
    waited: float


@dataclass(frozen=True)
class WorkerTerminating:
    """A worker's Python handler of SIGTERM has begun, or ended."""

    local_rank: int
    ended: bool


# -- from the forkserver -------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """The forkserver has finished its imports.

    Attributes:
        why: why it cannot fork workers, or None.
        drain: the pid of the process that writes the workers' output.
    """

    why: str | None
    drain: int = 0


@dataclass(frozen=True)
class WorkerExited:
    """A worker has ended; `status` is the wait status of waitpid(2)."""

    local_rank: int
    status: int
    monotonic: float


@dataclass(frozen=True)
class StoreExited:
    """The process that serves torch's store has ended."""

    status: int


@dataclass(frozen=True)
class EndsReported:
    """The answer to `ReportEnds`, after the `WorkerExited` messages."""


@dataclass(frozen=True)
class WorkersGone:
    """The answer to `Stop`: no process of the workers is left."""


FROM_AGENT = Codec(StartRound, WarnWorkers, Stop, ReportEnds, Quit)
FROM_WORKER = Codec(
    WorkerFailing, Missing, WorkerAlive, WorkerPhase, WorkerWaits, WorkerTerminating
)
FROM_FORKSERVER = Codec(
    Ready,
    WorkerExited,
    StoreExited,
    EndsReported,
    WorkersGone,
    WorkerFailing,
    Missing,
    WorkerAlive,
    WorkerPhase,
    WorkerWaits,
)


# -- the report pipe of the workers ----------------------------------------------------------------


def read_reports(pipe: int) -> Iterator[Any]:
    """Yield the reports that have arrived in the workers' pipe; skip lines that are no report.

    A worker writes each line at once, so that it is never divided.
    """
    data = b""
    with contextlib.suppress(BlockingIOError):
        data = os.read(pipe, _MAX_READ)
    for line in data.split(b"\n"):
        # User code can write anything into the pipe.
        with contextlib.suppress(ValueError, RecursionError):
            message = FROM_WORKER.decode(json.loads(line))
            if isinstance(message, WorkerFailing):
                began = min(message.monotonic, time.monotonic())
                message = replace(message, monotonic=began, started=True)
            yield message
