"""The connection of one agent to the coordinator: join, exchange messages, join again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterjob.node.agent.joining import Joining
from clusterjob.node.agent.local_coordinator import LocalCoordinator
from clusterjob.node.agent.parent import AgentParent
from clusterjob.node.agent.state_report import StateReport
from clusterjob.node.rendezvous import messages, succession
from clusterjob.node.rendezvous.coordinator_link import LocalLink, RemoteLink
from clusterjob.node.rendezvous.coordinator_state import Succession
from clusterjob.node.rendezvous.stop_requests import StopRequests
from clusterjob.node.rendezvous.succession import Earlier
from clusterjob.node.system.crashes import Crashes

# Seconds to look for the coordinator before another node takes its place: if it was killed, as it
# may come back, and if it is silent.
_RETURN_SECONDS, _SEARCH_SECONDS = 3.0, 1.0
_AGAIN_SECONDS = 5.0  # more seconds for each time that no other node has joined this one


class Connection:
    """The connection of one agent to the coordinator, which may run in this process.

    Args:
        hello: the first message of this agent.
        job_dir: the job's directory, as this node sees it.
        joining: the ways to a coordinator on another node.
        coordinator: the coordinator, if it runs in this process.
        requests: the stop requests that reach this agent.
        report: the state of this node.
        crashes: the errors of background tasks.
        parent: keeps notes for the next agent of this node; None without restarts.
        polls: whether the coordinator's agent looks for cancel requests in the job's directory.
    """

    def __init__(
        self,
        hello: messages.Hello,
        job_dir: Path,
        joining: Joining,
        coordinator: LocalCoordinator,
        requests: StopRequests,
        report: StateReport,
        crashes: Crashes,
        parent: AgentParent | None,
        *,
        polls: bool,
    ) -> None:
        self._hello = hello
        self._job_dir = job_dir
        self._joining = joining
        self._coordinator = coordinator
        self._requests = requests
        self._crashes = crashes
        self._parent = parent
        self._polls = polls
        self._link: LocalLink | RemoteLink | None = None
        self._report = report
        self._alone = 0  # how often this agent has become the coordinator since the last round

    async def join(self) -> bool:
        """Join the coordinator, or be it; return False if the job is cancelled first, or over."""
        earlier = self._earlier()
        if earlier is not None:
            # Another node may have become the coordinator since this node's last agent ended.
            self._hello = replace(self._hello, again=True)
            look = self._joining.look(self._hello, earlier.state.addresses)
            if not await self._until_cancelled(look) and not self._requests.cancelled.done():
                self._coordinate(earlier)
        elif self._hello.node_rank == 0:
            self._coordinate(None)
        else:
            await self._until_cancelled(self._joining.join(self._hello))
        return self._link is not None

    def _earlier(self) -> Earlier | None:
        """Return the coordinator that ran in this node's last agent; None if there was none."""
        parent = self._parent if self._parent is not None and self._parent.starts else None
        coordinated = self._hello.node_rank == 0 if parent is None else parent.kept("coordinates")
        if not coordinated:
            return None
        why = f"the agent of node {self._hello.node_rank} was started again"
        return succession.from_disk(
            self._job_dir, self._hello.attempt, why=why if parent is None else parent.why
        )

    async def join_again(self, lost: messages.ConnectionLost) -> bool:
        """Join the next coordinator, or become it; return False if the job is cancelled, or over.

        Raises:
            RendezvousError: there was none in time.
        """
        # An agent that was killed comes back after a second.
        after = _RETURN_SECONDS if lost.ended else _SEARCH_SECONDS
        after += self._alone * _AGAIN_SECONDS
        while not await self._until_cancelled(self._joining.join(self._hello, after=after)):
            if self._requests.cancelled.done() or self._joining.has_ended():
                return False
            gone = await self._joining.gone()
            earlier = self._joining.earlier(lost.why, gone, ended=lost.ended)
            if earlier is not None and self._joining.may_coordinate(gone):
                self._coordinate(earlier)
                self._alone += 1
                break
        return True

    @property
    def follows(self) -> bool:
        """Whether the coordinator is on another node."""
        return isinstance(self._link, RemoteLink)

    @property
    def heard_at(self) -> float:
        """The monotonic time of the coordinator's last message; 0 without a coordinator."""
        if self._link is None:
            return 0.0
        return self._link.heard_at if isinstance(self._link, RemoteLink) else time.monotonic()

    def send(self, message: Any) -> None:
        """Send the coordinator a message, if there is one."""
        if self._link is not None:
            self._link.send(message)

    async def report(self) -> None:
        """Send the state of the node whenever it changes."""
        while True:
            await self._report.changed.wait()
            self._report.changed.clear()
            self.send(self._report.now())

    async def next_order(self) -> Any:
        """Return the coordinator's next message; None if it has ended.

        Raises:
            Exception: the error of a background task, or of the coordinator in this process.
        """
        assert self._link is not None
        ordering = asyncio.ensure_future(self._link.orders.get())
        waiting: set[asyncio.Future[Any]] = {ordering, self._crashes.first}
        if self._coordinator.task is not None:
            waiting.add(self._coordinator.task)
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if self._crashes.first.done():
            raise self._crashes.first.result()
        if ordering.done():
            return ordering.result()
        ordering.cancel()
        return self._coordinator.lost()

    def note_successors(self, order: Succession) -> None:
        """Record which nodes may take the coordinator's place, and that this node knows it."""
        self._keep("successors", self._joining.note(order))
        if order.rounds_seen != self._hello.rounds:
            self._hello = replace(self._hello, rounds=order.rounds_seen)
            self._keep("rounds", order.rounds_seen)
            self._report.set(seen=order.rounds_seen)

    def note_round(self) -> None:
        """Record that a round has begun: a search for the coordinator was successful."""
        self._joining.found()
        self._alone = 0

    async def close(self) -> None:
        """Close the connection, if there is one."""
        if self._link is not None:
            link, self._link = self._link, None
            await link.close()

    def _coordinate(self, earlier: Earlier | None) -> None:
        """Become the coordinator: at the start of the job, or in the place of an earlier one."""
        self._keep("coordinates", True)
        self._keep("joined", True)
        self._link = self._coordinator.start(self._hello, earlier)
        self._hello = replace(self._hello, again=True)
        if self._polls:
            self._requests.poll_job_dir()  # the coordinator informs the other nodes
        # Requests may have arrived during the imports: the coordinator then starts no workers.
        self.send(self._report.now())
        self._coordinator.run()

    async def _until_cancelled(self, connect: Coroutine[Any, Any, RemoteLink | None]) -> bool:
        """Wait for the link to the coordinator; return False if the job is cancelled first."""
        connecting = asyncio.create_task(connect)
        either: set[asyncio.Future[Any]] = {
            connecting,
            self._requests.cancelled,
            self._crashes.first,
        }
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._crashes.first.done():
            connecting.cancel()
            raise self._crashes.first.result()
        if not connecting.done():
            connecting.cancel()
        elif (link := connecting.result()) is not None:
            self._link, self._hello = link, replace(self._hello, again=True)
            self._keep("joined", True)
            self._keep("coordinates", False)
            for task in link.tasks:
                self._crashes.watch(task)
            self._report.changed.set()
        return self._link is not None

    def _keep(self, name: str, value: Any) -> None:
        if self._parent is not None:
            self._parent.keep(name, value)
