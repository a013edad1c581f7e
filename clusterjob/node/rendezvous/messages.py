"""The messages between the agents of a job and its coordinator.

The token proves that an agent belongs to the job. It does not prove that the agent's host can be
trusted; see `clusterjob.node.rendezvous.sender_check`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from clusterjob.node.rendezvous.coordinator_state import Succession
from clusterjob.node.rendezvous.stack_messages import (
    StackFound,
    StacksCollected,
)
from clusterjob.node.states import NodeState, Order
from clusterjob.node.system.codec import Codec, Limit
from clusterjob.node.verdict import Verdict

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
class CoordinatorLost:
    """The agent has lost the coordinator and stops its workers."""

    why: str


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


# -- from the coordinator ------------------------------------------------------------------------


@dataclass(frozen=True)
class Welcome:
    """The agent has joined."""


@dataclass(frozen=True)
class Refused:
    """The agent may not join."""

    why: str


@dataclass(frozen=True)
class End:
    """The job has ended."""

    verdict: Verdict


# -- inside one process, never on the wire -------------------------------------------------------


@dataclass(frozen=True)
class PreflightFound:
    """The result of the preflight, as JSON of the measuring process of the coordinator's node."""

    result: bytes


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
    CoordinatorLost,
    RankWaits,
    StackFound,
    StacksCollected,
)
FROM_COORDINATOR = Codec(
    Order,
    Heartbeat,
    Welcome,
    Refused,
    Succession,
    End,
)
