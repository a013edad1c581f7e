"""The connection of an agent to the coordinator: look for it, join it, notice its loss."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from clusterjob.errors import RendezvousError
from clusterjob.node.agent.node_workers import StateReport
from clusterjob.node.logs import ends
from clusterjob.node.options import LaunchOptions
from clusterjob.node.rendezvous import messages, protocol
from clusterjob.node.rendezvous.identity import NodeJob
from clusterjob.node.rendezvous.membership import Stalls
from clusterjob.node.rendezvous.protocol import Channel
from clusterjob.node.system import network
from clusterjob.node.system.codec import MalformedMessageError

# Seconds between two rounds of attempts: the first pause, and the longest of an agent that joins
# for the first time, or again.
_FIRST_PAUSE, _MAX_PAUSE, _MAX_PAUSE_AGAIN = 0.02, 1.0, 0.3
_CHECK_SECONDS = 0.3  # between two looks at the job's directory
_CONNECT_SECONDS = 5.0
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


class Link:
    """A connection to the coordinator on another node, with a lease at both ends.

    Args:
        channel: the connection, authenticated.
        options: the heartbeat interval and the lease, in seconds.
        orders: receives the coordinator's messages, and `ConnectionLost` when it is lost.
        start: starts a background task.

    Attributes:
        heard_at: the monotonic time at which this agent has sent what the coordinator has answered
            last.
    """

    def __init__(
        self,
        channel: Channel,
        options: LaunchOptions,
        orders: asyncio.Queue[Any],
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self.heard_at = channel.joined_at
        self.send = channel.send
        self._channel = channel
        self._options = options
        self._orders = orders
        self._stalls = Stalls(options.heartbeat)
        self._tasks = [start(self._receive()), start(self._send_heartbeats())]

    async def close(self) -> None:
        """Close the connection after all messages were sent."""
        for task in self._tasks:
            task.cancel()
        await self._channel.close()

    async def _receive(self) -> None:
        why, ended = "the connection to it was closed", True
        try:
            while (message := await self._channel.receive()) is not None:
                if isinstance(message, messages.Heartbeat):
                    self.heard_at = min(max(self.heard_at, message.at), time.monotonic())
                self._orders.put_nowait(message)
        except (RendezvousError, MalformedMessageError) as error:
            why, ended = str(error), False
        stalled = self._stalls.recent(self._options.lease)
        if stalled > self._options.lease:
            cause = "stopped, suspended or without a CPU"
            why, ended = f"this agent did not run for {stalled:.0f} s ({cause}), and {why}", False
        self._orders.put_nowait(messages.ConnectionLost(why, ended=ended))

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._options.heartbeat)
            self.send(messages.Heartbeat(time.monotonic()))
            self._stalls.tick()
            silence = time.monotonic() - self.heard_at
            # After a stall, the coordinator may need a moment: it may have been frozen too.
            stalled = self._stalls.recent(2 * self._options.heartbeat)
            if silence > self._options.lease and not stalled:
                why = f"no message from it for {silence:.0f} s"
                self._orders.put_nowait(messages.ConnectionLost(why))
                return


@dataclass(frozen=True)
class Search:
    """A search for the coordinator.

    Attributes:
        node: the job, as this node sees it.
        hello: the first message of this agent.
        report: the state of this node, with the request to cancel the job.
        deadline: the monotonic time at which it ends.
        first: whether this node has never joined; the coordinator may then refuse it.
        errors: why no coordinator was found at a port, by the port.
        turn: lets one connection join; see `protocol.join`.
    """

    node: NodeJob
    hello: messages.Hello
    report: StateReport
    deadline: float
    first: bool
    errors: dict[int, str] = field(default_factory=dict)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, addresses: Iterable[str], turn: float = math.inf) -> Channel | None:
        """Join at one of some addresses; return None at `turn`.

        Args:
            addresses: where the coordinator may listen.
            turn: the monotonic time at which this agent becomes the coordinator itself.

        Raises:
            RendezvousError: the coordinator refused this agent, or was not found in time, or the
                job is cancelled or over; the message names the address, ports and errors.
        """
        begin = time.monotonic()
        notice_at = begin + _FIRST_NOTICE
        directory, attempt = self.node.directory, self.node.identity.attempt
        # One that is silent, such as a coordinator that was stopped, delays no other. Most answer
        # before the next attempt begins.
        attempts = [
            asyncio.create_task(self._join_at(host, port, index * _FIRST_PAUSE))
            for host in dict.fromkeys(addresses)
            for index, port in enumerate(self.node.identity.ports)
        ]
        try:
            while (moment := time.monotonic()) < turn:
                # Who has no answer yet may be counted already by a coordinator that is busy.
                if not attempts or (self.errors and moment > self.deadline):
                    raise RendezvousError(f"{self._error()}; gave up after {moment - begin:.0f} s")
                over = not self.first and ends.has_result(directory, attempt)
                if over or self.report.state.request.cancel:
                    raise RendezvousError("the job has ended without this node")
                refused = ends.refusals(directory, attempt) if self.first else []
                if why := next((each.message for each in refused if not each.node_rank), ""):
                    raise RendezvousError(f"node 0 did not start: {why}")
                if moment > notice_at:
                    self.node.print_line(f"{self._error()}; {moment - begin:.0f} s so far")
                    notice_at = moment + _NOTICE_SECONDS
                timeout = min(_CHECK_SECONDS, turn - moment)
                await asyncio.wait(attempts, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                for task in [each for each in attempts if each.done()]:
                    attempts.remove(task)
                    if (channel := task.result()) is not None:
                        return channel
            return None
        finally:
            # One that went on would join a coordinator that starts in this process.
            for task in attempts:
                task.cancel()
            for found in await asyncio.gather(*attempts, return_exceptions=True):
                if isinstance(found, Channel):
                    await found.close()

    def _error(self) -> str:
        """Return why no coordinator was found until now."""
        topology, ports = self.node.topology, dict[str, list[str]]()
        for port in self.node.identity.ports:
            ports.setdefault(self.errors.get(port, _NO_ANSWER), []).append(str(port))
        whys = [
            f"{why} (port{'s' * (len(own) > 1)} {', '.join(own)})" for why, own in ports.items()
        ]
        return (
            f"node {topology.node_rank} cannot reach node 0 at {topology.master_addr}:"
            f" {'; '.join(whys)}"
        )

    async def _join_at(self, host: str, port: int, after: float) -> Channel | None:
        """Try the addresses of a host in turn; return None if its name never resolves.

        Args:
            host: the host.
            port: the port.
            after: seconds until the first attempt.

        Raises:
            RefusedError: the coordinator refuses an agent that joins for the first time.
        """
        await asyncio.sleep(after)
        pause, begin, addresses = _FIRST_PAUSE, time.monotonic(), list[str]()
        while True:
            try:
                # asyncio's own lookup runs in a thread that cannot be cancelled and would delay
                # this agent's exit.
                addresses = await asyncio.to_thread(network.addresses_of, host)
            except OSError as error:
                self.errors[port] = _reason(error)
                late = time.monotonic() > begin + _RESOLVE_SECONDS
                if (
                    (late or isinstance(error, network.NoNameServerError))
                    and self.first
                    and self.node.topology.source in _MACHINE_NAMES
                ):
                    return None
            for address in addresses:
                try:
                    return await self._attempt(address, port, _CONNECT_SECONDS / len(addresses))
                except _ATTEMPT_ERRORS as error:
                    self.errors[port] = _reason(error)
                except protocol.RefusedError as error:
                    if self.first:
                        raise
                    self.errors[port] = error.message  # it has not noticed the last link's end yet
            await asyncio.sleep(pause)
            pause = min(_MAX_PAUSE if self.first else _MAX_PAUSE_AGAIN, pause * 1.5)

    async def _attempt(self, address: str, port: int, connect_seconds: float) -> Channel:
        """Join the coordinator at one address and port; return the channel to it.

        Raises:
            RefusedError: the coordinator refuses this agent.
            _ATTEMPT_ERRORS: the coordinator does not listen there.
        """
        connecting = asyncio.open_connection(address, port, limit=protocol.LINE_BYTES)
        # Not asyncio.wait_for: before Python 3.12 it may lose a cancellation.
        reader, writer = await protocol.answer_of(connecting, connect_seconds)
        try:
            return await protocol.join(
                reader,
                writer,
                token=self.node.identity.token,
                job_id=self.node.identity.job_id,
                hello=self.hello,
                turn=self.turn,
            )
        except BaseException:
            writer.close()
            raise


def _reason(error: BaseException) -> str:
    """Return why an attempt to join failed."""
    if isinstance(error, asyncio.TimeoutError):
        return _NO_ANSWER
    number = getattr(error, "errno", None) or 0  # negative: of a name that does not resolve
    if number > 0:
        return os.strerror(number).lower()  # asyncio's text has the address and the port
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
