"""The messages between the agents of a job and its coordinator.

The token proves that an agent belongs to the job. It does not prove that the agent's host can be
trusted; see `check_sender`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from clusterjob.node.stacks.grouping import RankStack
from clusterjob.node.states import MAX_WORKERS, LocalRank, NodeState, Number, Order, Text
from clusterjob.node.system.codec import Codec, Limit, MalformedMessageError
from clusterjob.node.verdict import Failure, RoundEnd, Verdict

# One of them must be alive. A message to each agent names them all.
MAX_SUCCESSORS = 8

_Nodes = Annotated[tuple[Number, ...], Limit(1 << 14)]

# -- from both -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heartbeat:
    """The sender is alive.

    Attributes:
        at: the monotonic time at which an agent has sent it. The coordinator sends it back as it
            is: the agent's lease begins then, and not when the agent reads the answer, which may
            have waited for it while its machine was frozen.
    """

    at: float = 0.0


# -- from an agent -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """The first message of an agent.

    Attributes:
        node_rank: the number of its node.
        address: the address at which the other nodes reach it.
        endpoints: the host:port that this node holds for each worker, and one more.
        wants_endpoints: whether its workers need the endpoints of all nodes.
        key: drawn by the node; to join again it needs the same one.
    """

    node_rank: Number
    host: Text
    pid: int
    attempt: Number
    nnodes: Number
    nproc: Annotated[int, Limit(MAX_WORKERS, minimum=1)]
    address: Text = ""
    endpoints: Annotated[tuple[Text, ...], Limit(MAX_WORKERS + 1)] = ()
    wants_endpoints: bool = False
    key: Text = ""


@dataclass(frozen=True)
class ConnectionLost:
    """The connection to the coordinator has ended or is silent, and the agent stops its workers.

    Inside a process, it also tells of the connection to an agent.

    Attributes:
        ended: whether the other process has certainly ended its part.
    """

    why: str
    ended: bool = False


@dataclass(frozen=True)
class RankWaits:
    """How long the ranks of the node wait in collectives; about every 5 s.

    Attributes:
        ranks: local rank, and the means of its last steps in seconds: the length of a step, and the
            wait in it.
    """

    restart: Number
    ranks: Annotated[tuple[tuple[LocalRank, float, float], ...], Limit(MAX_WORKERS)]


@dataclass(frozen=True)
class StackFound:
    """The stacks of one living rank: a part of the answer to `Order.collect`."""

    restart: Number
    stack: RankStack


# -- from the coordinator ------------------------------------------------------------------------


@dataclass(frozen=True)
class Welcome:
    """The agent has joined."""


@dataclass(frozen=True)
class Refused:
    """The agent may not join."""

    why: str


@dataclass(frozen=True)
class Members:
    """The nodes that were alive when a round began, and the node of its coordinator."""

    nodes: _Nodes
    coordinator: Number


@dataclass(frozen=True)
class Lasting:
    """What a coordinator remembers of the rounds, with which another one goes on.

    Attributes:
        round: the number of the newest round, from 0; -1 before the first.
        nodes: the nodes of the newest round, in the order of their ranks.
        groups: the members of the last round that all its members have seen, then those of the
            newest round, if that is another one.
        avoided: the nodes that caused failures, the latest last.
        rounds: the rounds that have ended, of all attempts.
        first_started: when the first workers were started, RFC 3339.
        deadline: when the job must end, by the monotonic clock; infinity without a limit. In a
            message, the seconds that were left when it was made.
    """

    round: Annotated[int, Limit((1 << 24) - 1, minimum=-1)] = -1
    nodes: _Nodes = ()
    groups: Annotated[tuple[Members, ...], Limit(2)] = ()
    avoided: _Nodes = ()
    rounds: Annotated[tuple[RoundEnd, ...], Limit(256)] = ()
    first_started: Text | None = None
    deadline: float = math.inf


@dataclass(frozen=True)
class CoordinatorState:
    """What a coordinator keeps for the next one.

    Attributes:
        attempt: the number of the job's attempt, from 0.
        lasting: what it remembers; of many rounds, the latest.
        node, host: the coordinator's node.
        moves: how often the coordinator has moved to another node.
        addresses: those at which the coordinators after it may listen.
        boot: the boot of its machine; see `processes.boot_id`.
        clock: the time of the state, by the clock of the job's events.
        made_at: the time of the state, by the monotonic clock of the machine.
    """

    attempt: Number
    lasting: Lasting
    node: Number
    host: Text
    moves: Number
    addresses: Annotated[tuple[Text, ...], Limit(MAX_SUCCESSORS)]
    boot: Text
    clock: float
    made_at: float


@dataclass(frozen=True)
class Succession:
    """The nodes that may become the coordinator, in the order of their turns.

    Attributes:
        successors: each with its address.
        seen, seen_of: the round; see `clusterjob.node.states.NodeState`.
        state: the coordinator's state; None for an agent that is no successor.
    """

    successors: Annotated[tuple[tuple[Number, Text], ...], Limit(MAX_SUCCESSORS)]
    seen: Number
    seen_of: Number
    state: CoordinatorState | None = None


@dataclass(frozen=True)
class End:
    """The job has ended."""

    verdict: Verdict


FROM_AGENT = Codec(
    NodeState,
    Hello,
    Heartbeat,
    ConnectionLost,
    RankWaits,
    StackFound,
)
FROM_COORDINATOR = Codec(
    Order,
    Heartbeat,
    Welcome,
    Refused,
    Succession,
    End,
)


def check_sender(message: object, node_rank: int) -> None:
    """Check that an agent reports failures and stacks of its own node only.

    Args:
        message: a decoded message of an agent.
        node_rank: the agent's node.

    Raises:
        MalformedMessageError: a failure or a stack belongs to another node, or to an impossible
            worker.
    """
    failures: list[Failure] = []
    if isinstance(message, StackFound) and message.stack.node_rank != node_rank:
        raise MalformedMessageError(f"a stack of node {message.stack.node_rank}")
    if isinstance(message, NodeState):
        failures = [each.failure for each in (*message.failing, *message.exits)]
        if any(each.failure.rank is None for each in message.exits):
            raise MalformedMessageError("an early exit without a rank")
        failures += message.probed.failures if message.probed is not None else ()
    for failure in failures:
        if failure.node_rank != node_rank:
            raise MalformedMessageError(f"a failure of node {failure.node_rank}")
        if (failure.rank is None) != (failure.local_rank is None):
            raise MalformedMessageError("a failure with only one of rank and local rank")
