"""The messages between the agents of a job and its coordinator.

The token proves that an agent belongs to the job. It does not prove that the agent's host can be
trusted; see `clusterjob.node.rendezvous.sender_check`.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Annotated

from clusterjob.node.contract import World
from clusterjob.node.preflight import preflight_messages as preflight
from clusterjob.node.rendezvous.coordinator_state import Succession
from clusterjob.node.rendezvous.stack_messages import (
    CollectStacks,
    ProgressReported,
    ReportProgress,
    StackFound,
    StacksCollected,
)
from clusterjob.node.states import NodeState, Order
from clusterjob.node.system.codec import Codec, Limit
from clusterjob.node.verdict import Failure, Verdict

Rank = Annotated[int, Limit((1 << 24) - 1)]
LocalRank = Annotated[int, Limit((1 << 12) - 1)]
Name = Annotated[str, Limit(300)]

# -- from both -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heartbeat:
    """The sender is alive."""


# -- from an agent -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """The first message of an agent.

    Attributes:
        node_rank: the number of its node.
        address: the address at which the other nodes reach it.
        counted_by: the platform's variable from which node_rank was read.
        endpoints: the host:port that this node holds for each worker, and one more.
        wants_endpoints: whether its workers need the endpoints of all nodes.
        again: whether the node has joined before.
        rounds: the number of the newest round that the node has seen, plus 1; 0 without one.
        key: drawn by the node; to join again it needs the same one.
    """

    node_rank: Rank
    host: Name
    pid: int
    attempt: Rank
    nnodes: Rank
    nproc: Annotated[int, Limit(1 << 12, minimum=1)]
    address: Name = ""
    counted_by: Name = ""
    endpoints: Annotated[tuple[Name, ...], Limit((1 << 12) + 1)] = ()
    wants_endpoints: bool = False
    again: bool = False
    rounds: Rank = 0
    key: Name = ""


@dataclass(frozen=True)
class RoundSeen:
    """The agent knows the nodes of a round, whose number plus 1 is `rounds`."""

    rounds: Rank


@dataclass(frozen=True)
class Running:
    """All workers of the node have been started."""


@dataclass(frozen=True)
class Done:
    """All workers of the node have ended."""


@dataclass(frozen=True)
class Stopped:
    """No process of this round is left on the node."""


@dataclass(frozen=True)
class StartedByExec:
    """The node starts its workers by exec instead of fork; `why` is the reason."""

    why: str


@dataclass(frozen=True)
class Cancel:
    """End the job; `interrupt` after Ctrl-C, so that workers get SIGINT.

    `stacks`: save the stacks of the workers first. `terminated`: after a scheduler's SIGTERM.
    """

    why: str
    interrupt: bool = False
    stacks: bool = False
    terminated: bool = False


@dataclass(frozen=True)
class KillNow:
    """Stop the workers without grace: a second Ctrl-C."""


@dataclass(frozen=True)
class PreemptionWarning:
    """The scheduler has announced a preemption of the node."""

    why: str


@dataclass(frozen=True)
class CoordinatorLost:
    """The agent has lost the coordinator and stops its workers."""

    why: str


@dataclass(frozen=True)
class Succeeded:
    """A worker has ended with exit code 0."""

    local_rank: LocalRank


@dataclass(frozen=True)
class RankCounts:
    """How far the ranks of the node are; an agent sends it at most ten times a second.

    Attributes:
        restart: the round.
        joined: the ranks that have begun the rendezvous of a process group.
        formed: the ranks that have formed it.
        importing: whether a rank imports torch at this moment.
    """

    restart: Rank
    joined: Annotated[int, Limit(1 << 12)]
    formed: Annotated[int, Limit(1 << 12)]
    importing: bool = False


@dataclass(frozen=True)
class RankWait:
    """How long one rank waits in collectives: the means of its last steps, in seconds.

    Attributes:
        local_rank: the rank's index on its node.
        step: the length of a step.
        waited: the wait in a step.
    """

    local_rank: LocalRank
    step: float
    waited: float


@dataclass(frozen=True)
class RankWaits:
    """How long the ranks of the node wait in collectives; about every 5 s."""

    restart: Rank
    ranks: Annotated[tuple[RankWait, ...], Limit(1 << 12)]


@dataclass(frozen=True)
class Failing:
    """A worker or the node has failed; the worker may still be exiting.

    Attributes:
        age: seconds since the failure, by the agent's monotonic clock.
        exited: whether the process has ended.
    """

    failure: Failure
    age: float
    exited: bool


@dataclass(frozen=True)
class RanksMissing:
    """A worker waits for ranks that have not joined.

    Attributes:
        restart: the round.
        local_rank: the worker that waits.
        ranks: the ranks that have not joined.
        final: whether the worker gives up now.
    """

    restart: Rank
    local_rank: LocalRank
    ranks: tuple[Rank, ...]
    final: bool


@dataclass(frozen=True)
class RanksProbed:
    """The answer to `ProbeRanks`.

    Attributes:
        lines: one line for each worker.
        failures: the workers as failures, if the ranks that waited for them have given up.
    """

    restart: Rank
    final: bool
    lines: tuple[str, ...]
    failures: tuple[Failure, ...]


@dataclass(frozen=True)
class EarlyExit:
    """A rank that ended with exit code 0, `age` seconds ago by the agent's monotonic clock."""

    failure: Failure
    age: float


@dataclass(frozen=True)
class FailuresReported:
    """The answer to `ReportFailures`: all failures of the node were sent before it."""

    restart: Rank
    exits: tuple[EarlyExit, ...]


# -- from the coordinator ------------------------------------------------------------------------


@dataclass(frozen=True)
class Welcome:
    """The agent has joined."""


@dataclass(frozen=True)
class Refused:
    """The agent may not join."""

    why: str


@dataclass(frozen=True)
class Start:
    """Start one round of workers."""

    world: World


@dataclass(frozen=True)
class StartWithStore(Start):
    """`Start` for the agent in the coordinator's process; it has the socket of the store."""

    store: socket.socket


@dataclass(frozen=True)
class Stop:
    """Stop the workers: send `signal`, and SIGKILL `grace` seconds later.

    Attributes:
        early: whether a worker that saves nothing gets SIGKILL earlier.
    """

    grace: float
    signal: int
    early: bool = False


@dataclass(frozen=True)
class Warn:
    """Tell the workers that a preemption is near."""


@dataclass(frozen=True)
class ProbeRanks:
    """Report the state of these ranks.

    Attributes:
        final: whether the ranks that wait for them have given up.
        note: a line for the log of each; the coordinator then needs no answer.
    """

    ranks: tuple[Rank, ...]
    final: bool
    note: str = ""


@dataclass(frozen=True)
class RanksFound:
    """The state of the ranks that a worker waits for; it is written to that worker's log."""

    local_rank: LocalRank
    lines: tuple[str, ...]


@dataclass(frozen=True)
class ReportFailures:
    """Report every failure that is known by now, then answer `FailuresReported`."""

    restart: Rank


@dataclass(frozen=True)
class End:
    """The job has ended."""

    verdict: Verdict


# -- inside one process, never on the wire -------------------------------------------------------


@dataclass(frozen=True)
class ConnectionLost:
    """The connection to an agent, or to the coordinator, has ended or is silent.

    Attributes:
        ended: whether the other process has certainly ended its part.
    """

    why: str
    ended: bool = False


FROM_AGENT = Codec(
    NodeState,
    Hello,
    Heartbeat,
    RoundSeen,
    Running,
    Done,
    Stopped,
    StartedByExec,
    Cancel,
    KillNow,
    PreemptionWarning,
    CoordinatorLost,
    Succeeded,
    RankCounts,
    RankWaits,
    Failing,
    RanksMissing,
    RanksProbed,
    FailuresReported,
    StackFound,
    StacksCollected,
    ProgressReported,
    preflight.MeasuringStarted,
    preflight.Measured,
    preflight.ClockRead,
    preflight.MeasuringEnded,
)
FROM_COORDINATOR = Codec(
    Order,
    Heartbeat,
    Welcome,
    Refused,
    Start,
    Stop,
    Warn,
    ProbeRanks,
    RanksFound,
    ReportFailures,
    CollectStacks,
    ReportProgress,
    Succession,
    preflight.BeginPreflight,
    preflight.MeasureHost,
    preflight.MeasureGroup,
    preflight.ReadClock,
    preflight.EndPreflight,
    End,
)
