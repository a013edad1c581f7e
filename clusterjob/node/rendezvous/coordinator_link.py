"""The link of an agent to the coordinator: connect, exchange messages, and detect its loss."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

from clusterjob.errors import RendezvousError
from clusterjob.node.options import LaunchOptions
from clusterjob.node.rendezvous import messages, protocol
from clusterjob.node.rendezvous.identity import JobIdentity, NodeJob
from clusterjob.node.rendezvous.membership import Membership
from clusterjob.node.rendezvous.protocol import Channel
from clusterjob.node.rendezvous.stalls import Stalls
from clusterjob.node.system import network
from clusterjob.node.system.codec import MalformedMessageError

# Seconds between two rounds of connection attempts: the first pause and the longest.
_FIRST_PAUSE, _MAX_PAUSE = 0.02, 1.0
_CONNECT_SECONDS = 5.0
_MAX_PROOF_SECONDS = 40.0  # seconds for the coordinator to prove the token, after some tries
_WELCOME_SECONDS = 60.0  # seconds for the coordinator to answer the first message
_NO_ANSWER = "no answer"
# Seconds until the first notice that node 0 cannot be reached, and between later notices.
_FIRST_NOTICE, _NOTICE_INTERVAL = 4.0, 5.0
# Seconds for node 0's name to resolve, on platforms where a name belongs to a machine. Elsewhere a
# name may appear only when its container starts.
_RESOLVE_SECONDS = 3.0
_MACHINE_NAMES = ("clusterjob", "slurm")
# The errors of an attempt to join where the coordinator does not listen.
ATTEMPT_ERRORS = (
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
        self._node_rank = hello.node_rank
        membership.join(hello, self.orders.put_nowait)

    def send(self, message: Any) -> None:
        """Send a message to the coordinator."""
        self._membership.receive(self._node_rank, message)

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


async def connect(
    node: NodeJob,
    hello: messages.Hello,
    refusal: Callable[[], str],
    leave: Callable[[], messages.Cancel | None],
) -> RemoteLink:
    """Join the coordinator; retry until it listens or --join-timeout has passed.

    Args:
        node: the job, as this node sees it; the coordinator listens at its master_addr.
        hello: the first message of this agent.
        refusal: returns the reason why node 0 cannot start; empty without one.
        leave: returns the job's cancellation; None before it.

    Raises:
        RendezvousError: the coordinator refused this agent, or was not found in time; the message
            names the addresses, ports and errors.
    """
    topology, options, job = node.topology, node.options, node.identity
    begin = time.monotonic()
    pause = _FIRST_PAUSE
    proof_seconds = protocol.HANDSHAKE_SECONDS  # grows: the coordinator of a large job may be busy
    # Ports by error, for messages: the results of the last complete round of attempts, or of the
    # first round while it runs.
    errors: dict[str, list[int]] = {}

    def describe() -> str:
        tried = [
            f"{why} (port{'s' if len(ports) > 1 else ''} {', '.join(map(str, ports))})"
            for why, ports in errors.items()
        ]
        where = f"node {topology.node_rank} cannot reach node 0 at {topology.master_addr}"
        return f"{where}: {'; '.join(tried) or f'no answer (port {job.ports[0]})'}"

    async def notify() -> None:
        await asyncio.sleep(_FIRST_NOTICE)
        while True:
            node.print_line(f"{describe()}; {time.monotonic() - begin:.0f} s so far")
            await asyncio.sleep(_NOTICE_INTERVAL)

    notifying = asyncio.create_task(notify())
    try:
        while True:
            found: dict[str, list[int]] = {}
            errors = errors or found
            last: BaseException | None = None
            for port in job.ports:
                if found and time.monotonic() - begin > options.join_timeout:
                    break  # if packets are dropped, each attempt takes seconds
                try:
                    left = options.join_timeout - (time.monotonic() - begin)
                    channel = await attempt(
                        topology.master_addr,
                        port,
                        job=job,
                        hello=hello,
                        leave=leave,
                        proof_seconds=proof_seconds,
                        welcome_seconds=min(max(left, proof_seconds), _WELCOME_SECONDS),
                    )
                    return RemoteLink(channel, options)
                except ATTEMPT_ERRORS as error:
                    found.setdefault(reason(error), []).append(port)
                    last = error
                    if isinstance(error, socket.gaierror):
                        break  # the name would not resolve for another port either
            errors = found
            if _NO_ANSWER in found:
                proof_seconds = min(2 * proof_seconds, _MAX_PROOF_SECONDS)
            waited = time.monotonic() - begin
            if refusal():
                raise RendezvousError(f"node 0 did not start: {refusal()}")
            unknown_name = (
                isinstance(last, socket.gaierror)
                and topology.source in _MACHINE_NAMES
                and (isinstance(last, network.NoNameServerError) or waited > _RESOLVE_SECONDS)
            )
            if unknown_name or waited > options.join_timeout:
                raise RendezvousError(f"{describe()}; gave up after {waited:.0f} s")
            await asyncio.sleep(pause)
            pause = min(_MAX_PAUSE, pause * 1.5)
    finally:
        notifying.cancel()


async def attempt(
    host: str,
    port: int,
    job: JobIdentity,
    hello: messages.Hello,
    leave: Callable[[], messages.Cancel | None],
    proof_seconds: float,
    welcome_seconds: float,
) -> Channel:
    """Join the coordinator at one port; return the channel to it.

    Raises:
        RefusedError: the coordinator refuses this agent.
        ATTEMPT_ERRORS: the coordinator does not listen there.
    """
    # asyncio's own lookup runs in a thread that cannot be cancelled and would delay this agent's
    # exit.
    addresses = await asyncio.to_thread(network.addresses_of, host)
    for address in addresses:
        try:
            connecting = asyncio.open_connection(address, port, limit=protocol.LINE_BYTES)
            timeout = _CONNECT_SECONDS / len(addresses)
            reader, writer = await asyncio.wait_for(connecting, timeout)
            break
        except (OSError, asyncio.TimeoutError):
            if address == addresses[-1]:
                raise
    try:
        return await protocol.join(
            reader,
            writer,
            token=job.token,
            job_id=job.job_id,
            hello=hello,
            leave=leave,
            proof_seconds=proof_seconds,
            welcome_seconds=welcome_seconds,
        )
    except BaseException:
        writer.close()
        raise


def reason(error: BaseException) -> str:
    """Return why an attempt to join failed."""
    if isinstance(error, asyncio.TimeoutError):
        return _NO_ANSWER
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
