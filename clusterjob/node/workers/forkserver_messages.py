"""The messages between an agent, its forkserver and its workers.

Agent and forkserver exchange one message per packet of a socket pair. Workers write to the
forkserver's report pipe, one message per line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from clusterjob.node.contract import World
from clusterjob.node.system.codec import Codec, Limit
from clusterjob.node.verdict import FailureKind

MESSAGE_BYTES = 1 << 17  # maximum of one message; SOCK_SEQPACKET keeps message boundaries
MAX_NAMED = 8  # maximum ranks that one message names
_Rank = Annotated[int, Limit((1 << 24) - 1)]
_ExitCode = Annotated[int, Limit(255)]

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
class StartMeasuring:
    """Start the measuring process of the preflight; the packet carries its end of a socket pair.

    Attributes:
        variables: environment variables of the process.
    """

    variables: dict[str, str]


@dataclass(frozen=True)
class WarnWorkers:
    """Warn the workers of this round and of all later rounds that a preemption is near."""


@dataclass(frozen=True)
class StopWorkers:
    """Stop the workers: send `signal`, and SIGKILL `grace` seconds later.

    Attributes:
        early: whether a worker that saves nothing gets SIGKILL earlier.
    """

    grace: float
    signal: int
    early: bool = False


@dataclass(frozen=True)
class ProbeWorkers:
    """Report the state of workers; with a note, write note and stacks into their logs instead.

    Attributes:
        final: whether the ranks that wait for them have given up.
    """

    local_ranks: tuple[int, ...]
    final: bool
    note: str = ""


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
        kind: a `FailureKind`; empty if the worker cannot determine it.
        started: False if the worker was never started.
        where: the file and line that raised the exception; empty if unknown.
    """

    local_rank: int
    monotonic: float
    message: str
    exit_code: _ExitCode
    kind: str = ""
    started: bool = True
    where: str = ""


@dataclass(frozen=True)
class WorkerWaiting:
    """A worker waits for ranks that have not joined; `final` is set when it gives up."""

    local_rank: int
    ranks: Annotated[tuple[_Rank, ...], Limit(MAX_NAMED)]
    final: bool


@dataclass(frozen=True)
class WorkerAlive:
    """A worker has called ``ctx.heartbeat()``; `step` is -1 if it gave none."""

    local_rank: int
    step: Annotated[int, Limit(2**62, minimum=-1)]


@dataclass(frozen=True)
class WorkerPhase:
    """A phase of a worker begins; `torch_patches.tell` writes this message.

    Attributes:
        phase: a value of `clusterjob.node.logs.events.Phase`; ``import`` and ``imported`` are the
            begin and the end of the import of torch.
        monotonic: the time of its begin, by the monotonic clock of the node.
    """

    local_rank: int
    phase: Annotated[str, Limit(20)]
    monotonic: float


@dataclass(frozen=True)
class WorkerWaits:
    """How long a worker has waited in collectives lately; `torch_patches` sends this message.

    Attributes:
        step: the mean length of a step, in seconds.
        waited: the mean wait in a step.
    """

    local_rank: int
    step: float
    waited: float


@dataclass(frozen=True)
class WorkerHandler:
    """A worker has a Python handler of SIGTERM; `hook` sends this message.

    Attributes:
        state: ``set``, ``begun`` or ``ended``.
    """

    local_rank: int
    state: Annotated[str, Limit(5)]


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
class ProbedWorker:
    """The state of a worker that other ranks wait for.

    Attributes:
        pid: its process id; None if it does not run.
        text: its current activity, or how it ended.
        stack: its main thread's frames, innermost first.
    """

    local_rank: int
    pid: int | None
    text: str
    stack: tuple[str, ...]


@dataclass(frozen=True)
class WorkersProbed:
    """The answer to `ProbeWorkers`."""

    final: bool
    workers: tuple[ProbedWorker, ...]


@dataclass(frozen=True)
class EndsReported:
    """The answer to `ReportEnds`, after the `WorkerExited` messages."""


@dataclass(frozen=True)
class WorkersGone:
    """The answer to `StopWorkers`: no process of the workers is left."""


FROM_AGENT = Codec(
    StartRound, StartMeasuring, WarnWorkers, StopWorkers, ProbeWorkers, ReportEnds, Quit
)
FROM_WORKER = Codec(
    WorkerFailing, WorkerWaiting, WorkerAlive, WorkerPhase, WorkerWaits, WorkerHandler
)
FROM_FORKSERVER = Codec(
    Ready,
    WorkerExited,
    StoreExited,
    WorkersProbed,
    EndsReported,
    WorkersGone,
    WorkerFailing,
    WorkerWaiting,
    WorkerAlive,
    WorkerPhase,
    WorkerWaits,
)


def encode(codec: Codec, message: Any) -> bytes:
    """Return a message as one line of JSON, without a newline."""
    return json.dumps(codec.encode(message)).encode()


def decode(codec: Codec, data: bytes) -> Any:
    """Return the message in a line of JSON.

    Raises:
        ValueError: the line is not JSON, or not a message of the codec.
        RecursionError: the JSON is nested too deeply.
    """
    return codec.decode(json.loads(data))


def failure_kind(message: WorkerFailing) -> FailureKind | None:
    """Return the kind that a worker reports; None if it reports no known kind."""
    try:
        return FailureKind(message.kind)
    except ValueError:
        return None
