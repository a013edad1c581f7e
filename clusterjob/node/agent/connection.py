"""The connection of one agent to the coordinator: join, exchange messages, join again.

An agent that loses the coordinator looks for it at its old address and at those of the nodes that
may take its place. Such a node becomes the coordinator itself when its turn comes.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from clusterjob.errors import RendezvousError
from clusterjob.node.agent.parent import AgentParent
from clusterjob.node.agent.state_report import StateReport
from clusterjob.node.agent.stop_requests import StopRequests
from clusterjob.node.coordinator import Coordinator, MinorityError
from clusterjob.node.logs import ends
from clusterjob.node.options import LaunchOptions
from clusterjob.node.rendezvous import messages, protocol, succession
from clusterjob.node.rendezvous.identity import NodeJob
from clusterjob.node.rendezvous.membership import Membership, Stalls
from clusterjob.node.rendezvous.messages import Succession
from clusterjob.node.rendezvous.protocol import Channel
from clusterjob.node.rendezvous.succession import Earlier
from clusterjob.node.system import network
from clusterjob.node.system.codec import MalformedMessageError
from clusterjob.node.system.crashes import Crashes
from clusterjob.node.verdict import Verdict

if TYPE_CHECKING:
    from clusterjob.node.notifications.notifier import Notifier

# Seconds to look for the coordinator before another node takes its place: if it was killed, as it
# may come back, and if it is silent.
_RETURN_SECONDS, _SEARCH_SECONDS = 3.0, 1.0
_AGAIN_SECONDS = 5.0  # more seconds for each time that no other node has joined this one
_LOOK_SECONDS = 0.5  # seconds for a coordinator that runs to answer
_TURN_SECONDS = 3.0  # seconds for each successor to become the coordinator
# Seconds between two rounds of attempts: the first pause, and the longest of an agent that joins
# for the first time, or again.
_FIRST_PAUSE, _MAX_PAUSE, _MAX_PAUSE_AGAIN = 0.02, 1.0, 0.3
_CHECK_SECONDS = 0.3  # between two looks at the job's directory
_CONNECT_SECONDS = 5.0
_MAX_PROOF_SECONDS = 40.0  # seconds for the coordinator to prove the token, after some tries
_WELCOME_SECONDS = 60.0  # seconds for the coordinator to answer the first message
_END_SECONDS = 2.0  # seconds for the coordinator to close its connections
_NO_ANSWER = "no answer"
# Seconds until the first notice that node 0 cannot be reached, and between later notices.
_FIRST_NOTICE, _NOTICE_SECONDS = 4.0, 5.0
# Seconds for node 0's name to resolve, on platforms where a name belongs to a machine. Elsewhere a
# name may appear only when its container starts.
_RESOLVE_SECONDS = 3.0
_MACHINE_NAMES = ("clusterjob", "slurm")
# The errors of an attempt to join where the coordinator does not listen.
_ATTEMPT_ERRORS = (
    OSError,
    asyncio.TimeoutError,
    MalformedMessageError,
    protocol.UnauthenticatedError,
)


class LocalLink:
    """The link of the agent whose process runs the coordinator.

    Args:
        membership: the coordinator's membership, which this agent joins.
        hello: the first message of this agent.

    Attributes:
        orders: messages of the coordinator.
    """

    def __init__(self, membership: Membership, hello: messages.Hello) -> None:
        self.orders: asyncio.Queue[Any] = asyncio.Queue()
        self._membership = membership
        self._peer = membership.join(hello, self.orders.put_nowait)

    def send(self, message: Any) -> None:
        """Send a message to the coordinator."""
        self._membership.receive(self._peer, message)

    async def close(self) -> None:
        """Do nothing: there is no connection."""


class RemoteLink:
    """The link of an agent on another node: a TCP connection with a lease at both ends.

    Args:
        channel: the connection, authenticated.
        options: the heartbeat interval and the lease, in seconds.

    Attributes:
        orders: messages of the coordinator, and `ConnectionLost` when it is lost.
        tasks: the background tasks of the link.
        heard_at: the monotonic time of the last message.
    """

    def __init__(self, channel: Channel, options: LaunchOptions) -> None:
        self.orders: asyncio.Queue[Any] = asyncio.Queue()
        self._channel = channel
        self._options = options
        self.heard_at = time.monotonic()
        self._stalls = Stalls(options.heartbeat)
        self.tasks = [
            asyncio.create_task(self._receive()),
            asyncio.create_task(self._send_heartbeats()),
        ]

    def send(self, message: Any) -> None:
        """Send a message to the coordinator."""
        self._channel.send(message)

    async def close(self) -> None:
        """Close the connection after all messages were sent."""
        for task in self.tasks:
            task.cancel()
        await self._channel.close()

    async def _receive(self) -> None:
        why, ended = "the connection to it was closed", True
        try:
            while (message := await self._channel.receive()) is not None:
                self.heard_at = time.monotonic()
                if not isinstance(message, messages.Heartbeat):
                    self.orders.put_nowait(message)
        except (RendezvousError, MalformedMessageError) as error:
            why, ended = str(error), False
        stalled = self._stalls.recent(self._options.lease)
        if stalled > self._options.lease:
            why = (
                f"this agent did not run for {stalled:.0f} s (stopped, suspended or without a CPU),"
                f" and {why}"
            )
            ended = False
        self.orders.put_nowait(messages.ConnectionLost(why, ended=ended))

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._options.heartbeat)
            self.send(messages.Heartbeat())
            if self._stalls.tick():
                self.heard_at = time.monotonic()  # this process could not receive meanwhile
            silence = time.monotonic() - self.heard_at
            if silence > self._options.lease:
                self.orders.put_nowait(
                    messages.ConnectionLost(f"no message from it for {silence:.0f} s")
                )
                return


class Connection:
    """The connection of one agent to the coordinator, which may run in this process.

    Args:
        node: the job, as this node sees it.
        hello: the first message of this agent.
        report: the state of this node.
        requests: the stop requests that reach this agent.
        crashes: the errors of background tasks.
        notifier: sends notifications if the coordinator is here; None without --notify.
        parent: keeps notes for the next agent of this node; None without restarts.
        polls: whether the coordinator's agent looks for cancel requests in the job's directory.
    """

    def __init__(
        self,
        node: NodeJob,
        hello: messages.Hello,
        report: StateReport,
        requests: StopRequests,
        crashes: Crashes,
        notifier: Notifier | None,
        parent: AgentParent | None,
        *,
        polls: bool,
    ) -> None:
        self._node = node
        self._options = node.options
        self._hello = hello
        self._report = report
        self._requests = requests
        self._crashes = crashes
        self._notifier = notifier
        self._parent = parent
        self._polls = polls
        self._link: LocalLink | RemoteLink | None = None
        self._coordinator: Coordinator | None = None
        self._coordinating: asyncio.Task[Verdict] | None = None
        self._succession: Succession | None = None
        self._received_at = 0.0
        self._addresses: list[str] = (parent.kept("successors") if parent else None) or []
        self._deadline: float | None = None  # of the search that goes on
        self._alone = 0  # how often this agent has become the coordinator since the last round

    @property
    def coordinates(self) -> bool:
        """Whether the coordinator is or was in this process, and gives the verdict of the job."""
        return self._coordinator is not None

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

    # -- messages ----------------------------------------------------------------------------------

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
        if self._coordinating is not None:
            waiting.add(self._coordinating)
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if self._crashes.first.done():
            raise self._crashes.first.result()
        if ordering.done():
            return ordering.result()
        ordering.cancel()
        assert self._coordinating is not None
        task, self._coordinating = self._coordinating, None
        try:
            task.result()
        except MinorityError as error:
            self._coordinator = None
            return messages.ConnectionLost(error.message)
        return None

    def note_successors(self, message: Succession) -> None:
        """Record which nodes may take the coordinator's place, and that this node knows it."""
        self._succession, self._received_at = message, time.monotonic()
        self._addresses = [each.address for each in message.successors]
        self._keep("successors", self._addresses)
        if message.rounds_seen != self._hello.rounds:
            self._hello = replace(self._hello, rounds=message.rounds_seen)
            self._keep("rounds", message.rounds_seen)
            self._report.set(seen=message.rounds_seen)

    def note_round(self) -> None:
        """Record that a round has begun: a search for the coordinator was successful."""
        self._deadline, self._alone = None, 0

    async def close(self) -> None:
        """Close the connection, if there is one."""
        if self._link is not None:
            link, self._link = self._link, None
            await link.close()

    # -- the coordinator here ----------------------------------------------------------------------

    def _coordinate(self, earlier: Earlier | None) -> None:
        """Become the coordinator: at the start of the job, or in the place of an earlier one."""
        self._keep("coordinates", True)
        self._keep("joined", True)
        topology = replace(self._node.topology, master_addr=self._hello.address)
        self._coordinator = Coordinator(
            replace(self._node, topology=topology), self._crashes.watch, self._notifier, earlier
        )
        self._link = LocalLink(self._coordinator.membership, self._hello)
        self._hello = replace(self._hello, again=True)
        if self._polls:
            self._requests.poll_job_dir()  # the coordinator informs the other nodes
        # Requests may have arrived during the imports: the coordinator then starts no workers.
        self.send(self._report.now())
        self._coordinating = asyncio.create_task(self._coordinator.run())

    def end_job(self, verdict: Verdict) -> None:
        """Send the agents the verdict of a job that ends because of this agent."""
        if self._coordinator is not None:
            self._coordinator.membership.broadcast(messages.End(verdict))

    async def stop_coordinating(self) -> None:
        """Stop the coordinator, if it is here."""
        if self._coordinating is not None:
            self._coordinating.cancel()
            await asyncio.wait([self._coordinating])

    async def end(self) -> None:
        """Close the connection; a coordinator here first lets the others read the verdict."""
        if self._coordinating is not None:
            await asyncio.wait([self._coordinating], timeout=_END_SECONDS)
            await self.stop_coordinating()
        await self.close()

    # -- join --------------------------------------------------------------------------------------

    async def join(self) -> bool:
        """Join the coordinator, or be it; return False if the job is cancelled first, or over.

        Raises:
            RendezvousError: the coordinator refused this agent, or was not found in time; the
                message names the addresses, ports and errors.
        """
        earlier = self._own_earlier()
        if earlier is not None:
            # Another node may have become the coordinator since this node's last agent ended.
            self._hello = replace(self._hello, again=True)
            self._addresses = list(earlier.state.addresses)
            look = self._search_again(time.monotonic() + _LOOK_SECONDS)
            if not await self._until_cancelled(look) and not self._requests.cancelled.done():
                self._coordinate(earlier)
        elif self._hello.node_rank == 0:
            self._coordinate(None)
        elif self._hello.again:
            return await self.join_again(messages.ConnectionLost("", ended=True))
        else:
            await self._until_cancelled(self._search_first())
        return self._link is not None

    async def join_again(self, lost: messages.ConnectionLost) -> bool:
        """Join the next coordinator, or become it; return False if the job is cancelled, or over.

        Raises:
            RendezvousError: there was none in time.
        """
        # An agent that was killed comes back after a second.
        after = _RETURN_SECONDS if lost.ended else _SEARCH_SECONDS
        after += self._alone * _AGAIN_SECONDS + self._position() * _TURN_SECONDS
        while not await self._until_cancelled(self._search_again(time.monotonic() + after)):
            if self._requests.cancelled.done() or self._has_ended():
                return False
            if (earlier := await self._lost_one(lost)) is not None:
                self._coordinate(earlier)
                self._alone += 1
                break
        return True

    def _own_earlier(self) -> Earlier | None:
        """Return the coordinator that ran in this node's last agent; None if there was none."""
        parent = self._parent if self._parent is not None and self._parent.starts else None
        coordinated = self._hello.node_rank == 0 if parent is None else parent.kept("coordinates")
        if not coordinated:
            return None
        why = f"the agent of node {self._hello.node_rank} was started again"
        return succession.from_disk(
            self._node.directory, self._hello.attempt, why=why if parent is None else parent.why
        )

    async def _lost_one(self, lost: messages.ConnectionLost) -> Earlier | None:
        """Return the coordinator whose place this agent may take; None if it may not."""
        state = self._succession.state if self._succession is not None else None
        if self._succession is None or state is None:
            return None
        own, moved = self._node.topology, state.node != self._node.topology.node_rank
        gone: frozenset[int] = frozenset()
        if moved and await asyncio.to_thread(succession.confirmed_ended, state, own.source):
            gone = frozenset({state.node})
        # Could the job go on if all nodes but the coordinator's joined this one?
        others = set(range(own.nnodes)) - ({state.node} if moved else set())
        if not succession.may_go_on(state.lasting.groups, others, gone):
            return None
        return Earlier(
            state,
            lost.why,
            ended=lost.ended,
            moved=moved,
            received_at=self._received_at,
            gone=gone,
        )

    def _position(self) -> float:
        """Return how many nodes come before this one; infinity if it may not coordinate."""
        known = self._succession
        nodes = [each.node for each in known.successors] if known and known.state else []
        own = self._node.topology.node_rank
        return nodes.index(own) if own in nodes else math.inf

    def _has_ended(self) -> bool:
        """Return whether the verdict of this attempt is in the shared job directory."""
        return ends.has_result(self._node.directory, self._node.identity.attempt)

    async def _until_cancelled(self, search: Coroutine[Any, Any, RemoteLink | None]) -> bool:
        """Wait for the link to the coordinator; return False if the job is cancelled first."""
        searching = asyncio.create_task(search)
        either: set[asyncio.Future[Any]] = {
            searching,
            self._requests.cancelled,
            self._crashes.first,
        }
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._crashes.first.done():
            searching.cancel()
            raise self._crashes.first.result()
        if not searching.done():
            searching.cancel()
        elif (link := searching.result()) is not None:
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

    # -- the search --------------------------------------------------------------------------------

    async def _search_first(self) -> RemoteLink:
        """Join for the first time; retry until --join-timeout has passed."""
        topology, begin = self._node.topology, time.monotonic()
        deadline = begin + self._options.join_timeout
        notice_at = begin + _FIRST_NOTICE
        # Ports by error, for messages: the results of the last complete round of attempts, or of
        # the first round while it runs.
        errors: dict[str, list[int]] = {}

        def describe() -> str:
            tried = [
                f"{why} (port{'s' if len(ports) > 1 else ''} {', '.join(map(str, ports))})"
                for why, ports in errors.items()
            ]
            where = f"node {topology.node_rank} cannot reach node 0 at {topology.master_addr}"
            nothing = f"no answer (port {self._node.identity.ports[0]})"
            return f"{where}: {'; '.join(tried) or nothing}"

        joining = asyncio.create_task(self._join_at(topology.master_addr, errors, deadline))
        try:
            while not (await asyncio.wait({joining}, timeout=_CHECK_SECONDS))[0]:
                moment = time.monotonic()
                refusals = ends.refusals(self._node.directory, self._node.identity.attempt)
                if why := next((each.message for each in refusals if not each.node_rank), ""):
                    raise RendezvousError(f"node 0 did not start: {why}")
                if moment > notice_at:
                    self._node.print_line(f"{describe()}; {moment - begin:.0f} s so far")
                    notice_at = moment + _NOTICE_SECONDS
            channel = joining.result()
        finally:
            joining.cancel()
        if channel is None:
            waited = time.monotonic() - begin
            raise RendezvousError(f"{describe()}; gave up after {waited:.0f} s")
        return RemoteLink(channel, self._options)

    async def _search_again(self, turn: float) -> RemoteLink | None:
        """Join again; return None if the job has ended, or it is this agent's turn to coordinate.

        Args:
            turn: the monotonic time at which this agent becomes the coordinator itself.

        Raises:
            RendezvousError: no coordinator has admitted this agent in time.
        """
        options, begin = self._options, time.monotonic()
        if self._deadline is None:
            wait = options.return_timeout
            if options.spares or options.min_nodes is not None:
                wait = max(wait, options.join_timeout)  # the job can go on without this node
            self._deadline = begin + wait
        errors: dict[str, list[int]] = {}
        attempts = [
            asyncio.create_task(self._join_at(address, errors, math.inf))
            for address in dict.fromkeys([self._node.topology.master_addr, *self._addresses])
        ]
        try:
            while not self._has_ended():
                moment = time.monotonic()
                if moment >= turn:
                    return None
                if moment >= self._deadline:
                    why = next(iter(errors), _NO_ANSWER)
                    raise RendezvousError(
                        f"no coordinator came back within {moment - begin:.0f} s: {why}"
                    )
                left = min(_CHECK_SECONDS, turn - moment, self._deadline - moment)
                done, _ = await asyncio.wait(
                    attempts, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
                for attempt in done:
                    attempts.remove(attempt)
                    if (channel := attempt.result()) is not None:
                        return RemoteLink(channel, options)
            return None
        finally:
            await _stop(attempts)

    async def _join_at(
        self, address: str, errors: dict[str, list[int]], deadline: float
    ) -> Channel | None:
        """Try the ports of one address in turn; return the channel, or None after the deadline.

        Args:
            address: where the coordinator may listen.
            errors: receives the results, as ports by error.
            deadline: a monotonic time; infinity for an agent that joins again.

        Raises:
            RefusedError: the coordinator refuses an agent that joins for the first time.
        """
        first, pause, begin = not math.isinf(deadline), _FIRST_PAUSE, time.monotonic()
        proof_seconds = protocol.HANDSHAKE_SECONDS  # grows: the coordinator may be busy
        found = errors
        while True:
            last: BaseException | None = None
            for port in self._node.identity.ports:
                if found and time.monotonic() > deadline:
                    break  # if packets are dropped, each attempt takes seconds
                try:
                    return await self._attempt(address, port, proof_seconds, deadline)
                except _ATTEMPT_ERRORS as error:
                    last = error
                    found.setdefault(_reason(error), []).append(port)
                    silent = isinstance(error, asyncio.TimeoutError) and not first
                    if silent or isinstance(error, socket.gaierror):
                        break  # the other ports would not answer either
                except protocol.RefusedError as error:
                    if first:
                        raise
                    found = {error.message: [port]}  # it has not noticed the last link's end yet
            if found is not errors:
                errors.clear()
                errors.update(found)
            if _NO_ANSWER in found:
                proof_seconds = min(2 * proof_seconds, _MAX_PROOF_SECONDS)
            moment = time.monotonic()
            unknown_name = (
                isinstance(last, socket.gaierror)
                and self._node.topology.source in _MACHINE_NAMES
                and (
                    isinstance(last, network.NoNameServerError) or moment - begin > _RESOLVE_SECONDS
                )
            )
            if moment > deadline or (first and unknown_name):
                return None
            found = {}
            await asyncio.sleep(pause)
            pause = min(_MAX_PAUSE if first else _MAX_PAUSE_AGAIN, pause * 1.5)

    async def _attempt(
        self, host: str, port: int, proof_seconds: float, deadline: float
    ) -> Channel:
        """Join the coordinator at one port; return the channel to it.

        Raises:
            RefusedError: the coordinator refuses this agent.
            _ATTEMPT_ERRORS: the coordinator does not listen there.
        """
        welcome = max(protocol.HANDSHAKE_SECONDS, self._options.lease)
        if not math.isinf(deadline):
            left = deadline - time.monotonic()
            welcome = min(max(left, proof_seconds), _WELCOME_SECONDS)
        # asyncio's own lookup runs in a thread that cannot be cancelled and would delay this
        # agent's exit.
        addresses = await asyncio.to_thread(network.addresses_of, host)
        for address in addresses:
            try:
                connecting = asyncio.open_connection(address, port, limit=protocol.LINE_BYTES)
                timeout = _CONNECT_SECONDS / len(addresses)
                reader, writer = await asyncio.wait_for(connecting, timeout)
            except (OSError, asyncio.TimeoutError):
                if address == addresses[-1]:
                    raise
                continue
            try:
                return await protocol.join(
                    reader,
                    writer,
                    token=self._node.identity.token,
                    job_id=self._node.identity.job_id,
                    hello=self._hello,
                    leave=lambda: self._report.now() if self._requests.cancelled.done() else None,
                    proof_seconds=proof_seconds,
                    welcome_seconds=welcome,
                )
            except BaseException as error:
                writer.close()
                # An address of a private network may here be that of another machine.
                if address == addresses[-1] or not isinstance(error, protocol.UnauthenticatedError):
                    raise
        raise AssertionError("a name has no address")


def _reason(error: BaseException) -> str:
    """Return why an attempt to join failed."""
    if isinstance(error, asyncio.TimeoutError):
        return _NO_ANSWER
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


async def _stop(attempts: Sequence[asyncio.Task[Any]]) -> None:
    """End all attempts: one that went on would join a coordinator that starts in this process.

    Before Python 3.12, asyncio.wait_for loses a cancellation that arrives with its result.
    """
    while running := [attempt for attempt in attempts if not attempt.done()]:
        for attempt in running:
            attempt.cancel()
        await asyncio.wait(running, timeout=_FIRST_PAUSE)
    for attempt in attempts:
        joined = not attempt.cancelled() and attempt.exception() is None
        if joined and (channel := attempt.result()) is not None:
            await channel.close()
