"""Join the coordinator on another node, and join it again after a loss."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence, Set
from typing import Any

from clusterjob.node.agent.reconnecting import Search, reconnect
from clusterjob.node.logs import ends
from clusterjob.node.rendezvous import coordinator_link, messages, succession
from clusterjob.node.rendezvous.coordinator_link import RemoteLink
from clusterjob.node.rendezvous.coordinator_state import Succession
from clusterjob.node.rendezvous.identity import NodeJob
from clusterjob.node.rendezvous.succession import Earlier
from clusterjob.node.states import NodeState

_LOOK_SECONDS = 0.5  # seconds for a coordinator that runs to answer
_TURN_SECONDS = 3.0  # seconds for each successor to become the coordinator
Joins = Coroutine[Any, Any, "RemoteLink | None"]


class Joining:
    """The ways of one agent to the coordinator.

    Args:
        node: the job, as this node sees it.
        leave: returns the state of this node if the job was cancelled, else None.
        addresses: where the next coordinator may listen; None if that is unknown.
    """

    def __init__(
        self,
        node: NodeJob,
        leave: Callable[[], NodeState | None],
        addresses: Sequence[str] | None = None,
    ) -> None:
        self._node = node
        self._leave = leave
        self._succession: Succession | None = None
        self._received_at = 0.0
        self._deadline: float | None = None  # of the search that goes on
        self._addresses = list(addresses or ())

    def note(self, message: Succession) -> list[str]:
        """Record who may take the coordinator's place; return their addresses."""
        self._succession, self._received_at = message, time.monotonic()
        self._addresses = [each.address for each in message.successors]
        return self._addresses

    def found(self) -> None:
        """Record that a coordinator has begun a round with this node."""
        self._deadline = None

    def may_coordinate(self, gone: Set[int]) -> bool:
        """Return whether the job could go on if all nodes but the coordinator's joined this one."""
        state = self._succession.state if self._succession else None
        if state is None:
            return False
        own = self._node.topology
        others = set(range(own.nnodes)) - ({state.node} - {own.node_rank})
        return succession.may_go_on(succession.groups(state), others, gone)

    async def gone(self) -> frozenset[int]:
        """Return the coordinator's node if it has certainly ended."""
        state = self._succession.state if self._succession else None
        if state is None or state.node == self._node.topology.node_rank:
            return frozenset()
        source = self._node.topology.source
        ended = await asyncio.to_thread(succession.confirmed_ended, state, source)
        return frozenset({state.node} if ended else ())

    def join(self, hello: messages.Hello, *, after: float = math.inf) -> Joins:
        """Join for the first time, or again if this node has joined before.

        Args:
            hello: the first message.
            after: seconds after which the first successor becomes the coordinator itself; infinity
                if this agent may not.
        """
        if hello.again:
            turn = time.monotonic() + after + self._position() * _TURN_SECONDS
            return self._reconnect(hello, turn)
        return coordinator_link.connect(
            self._node, hello, refusal=self._node_0_refusal, leave=self._leave
        )

    def look(self, hello: messages.Hello, addresses: Sequence[str]) -> Joins:
        """Join if another node has become the coordinator already.

        Args:
            hello: the first message.
            addresses: where it may listen.
        """
        self._addresses = list(addresses)
        return self._reconnect(hello, time.monotonic() + _LOOK_SECONDS)

    def _reconnect(self, hello: messages.Hello, turn: float) -> Joins:
        if self._deadline is None:
            options = self._node.options
            wait = options.return_timeout
            if options.spares or options.min_nodes is not None:
                wait = max(wait, options.join_timeout)  # the job can go on without this node
            self._deadline = time.monotonic() + wait
        search = Search(
            [self._node.topology.master_addr, *self._addresses], deadline=self._deadline, turn=turn
        )
        return reconnect(search, self._node, hello=hello, leave=self._leave, ended=self.has_ended)

    def has_ended(self) -> bool:
        """Return whether the verdict of this attempt is in the shared job directory."""
        return ends.has_result(self._node.directory, self._node.identity.attempt)

    def earlier(self, why: str, gone: frozenset[int], *, ended: bool) -> Earlier | None:
        """Return the lost coordinator, whose place this agent takes; None if it may not.

        Args:
            why: how it was lost.
            gone: its node, if that has certainly ended.
            ended: whether its process has certainly ended.
        """
        known = self._succession
        if known is None or known.state is None:
            return None
        state = known.state
        moved = state.node != self._node.topology.node_rank
        return Earlier(
            state,
            known.rounds,
            why=why,
            ended=ended,
            moved=moved,
            received_at=self._received_at,
            gone=gone,
        )

    def _position(self) -> float:
        """Return how many nodes come before this one; infinity if it is no successor."""
        known = self._succession
        nodes = [each.node for each in known.successors] if known and known.state else []
        own = self._node.topology.node_rank
        return nodes.index(own) if own in nodes else math.inf

    def _node_0_refusal(self) -> str:
        """Return why node 0 cannot start, from the shared job directory; empty if it may start."""
        refusals = ends.refusals(self._node.directory, self._node.identity.attempt)
        return next((failure.message for failure in refusals if failure.node_rank == 0), "")
