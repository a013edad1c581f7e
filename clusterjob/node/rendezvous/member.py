"""A node's end of the gang: finding the lead, hearing its orders, and knowing when it is lost."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Protocol

from clusterjob.errors import GangError
from clusterjob.node.environments.topology import Topology
from clusterjob.node.options import LaunchOptions
from clusterjob.node.rendezvous import protocol
from clusterjob.node.rendezvous.identity import JobIdentity
from clusterjob.node.rendezvous.membership import Gathering
from clusterjob.node.rendezvous.protocol import Channel, Message
from clusterjob.node.rendezvous.stalls import Stalls
from clusterjob.node.system import network

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0  # between two rounds of tries to find the lead
_CONNECT_SECONDS = 5.0
_FIRST_NOTICE, _LATER_NOTICES = (
    4.0,
    5.0,
)  # seconds before one says that node 0 is not found, and between later times
_NAMELESS = 3.0  # seconds for node 0's name to be known where names are those of machines
_FIXED_NAMES = ("clusterjob", "slurm")  # elsewhere a name may come to be with its container


class Link(Protocol):
    """What an agent knows of the lead, whether that is in another machine or in this very process."""

    orders: asyncio.Queue[Message]

    def send(self, message: Message) -> None:
        """Tell the lead something."""

    async def close(self) -> None:
        """End the connection once all was sent."""


class OwnLead:
    """The link of node 0's agent: the lead is in this process."""

    def __init__(self, gathering: Gathering, hello: Message) -> None:
        self.orders: asyncio.Queue[Message] = asyncio.Queue()
        self._gathering = gathering
        gathering.join(hello, self.orders.put_nowait)

    def send(self, message: Message) -> None:
        """Tell the lead something."""
        self._gathering.hear(0, message)

    async def close(self) -> None:
        """Nothing to be closed."""


class RemoteLead:
    """The link of every other node's agent: one authenticated connection, with a lease on both
    ends.
    """

    def __init__(self, channel: Channel, options: LaunchOptions) -> None:
        self.orders: asyncio.Queue[Message] = asyncio.Queue()
        self._channel = channel
        self._options = options
        self._heard_at = time.monotonic()
        self._stalls = Stalls(options.heartbeat)
        self.tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._beat())]

    def send(self, message: Message) -> None:
        """Tell the lead something."""
        self._channel.send(message)

    async def close(self) -> None:
        """End the connection once all was sent."""
        for task in self.tasks:
            task.cancel()
        await self._channel.close()

    async def _listen(self) -> None:
        why = "the connection to it was closed"
        try:
            while (message := await self._channel.receive()) is not None:
                self._heard_at = time.monotonic()
                if message["t"] != "beat":
                    self.orders.put_nowait(message)
        except GangError as error:
            why = error.message
        stalled = self._stalls.recent(self._options.lease)
        if stalled > self._options.lease:
            why = f"this agent did not run for {stalled:.0f} s (stopped, suspended or without a CPU), and {why}"
        self.orders.put_nowait({"t": "lost", "why": why})

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._options.heartbeat)
            self.send({"t": "beat"})
            if self._stalls.tick():
                self._heard_at = (
                    time.monotonic()
                )  # this process has heard nobody meanwhile, whoever spoke
            silence = time.monotonic() - self._heard_at
            if silence > self._options.lease:
                self.orders.put_nowait(
                    {"t": "lost", "why": f"nothing was heard of it for {silence:.0f} s"}
                )
                return


async def find_lead(
    topology: Topology,
    options: LaunchOptions,
    job: JobIdentity,
    hello: Message,
    say: Callable[[str], None],
    given_up: Callable[[], str],
) -> RemoteLead:
    """Return the link to the lead, waiting for it to be there.

    Args:
        topology: this node's place; its master_addr is where the lead is.
        options: how long to wait, and the heartbeat.
        job: the job's identity, with the candidate ports.
        hello: how this agent introduces itself.
        say: shows one line to whoever watches this node.
        given_up: says why node 0 will never be there; empty while it may come.

    Raises:
        GangError: the lead refused this agent, or was not found in time; the message says what was
            tried and what the kernel said.
    """
    begin = time.monotonic()
    pause = _FIRST_PAUSE
    troubles: dict[
        str, list[int]
    ] = {}  # the ports of the last round of tries, by what went wrong; of the first, as far as it is

    def text() -> str:
        tried = [
            f"{why} (port{'s' if len(ports) > 1 else ''} {', '.join(map(str, ports))})"
            for why, ports in troubles.items()
        ]
        where = f"node {topology.node_rank} cannot find node 0 at {topology.master_addr}"
        return f"{where}: {'; '.join(tried) or f'no answer (port {job.ports[0]})'}"

    async def tell() -> None:
        await asyncio.sleep(_FIRST_NOTICE)
        while True:
            say(f"{text()}; {time.monotonic() - begin:.0f} s so far")
            await asyncio.sleep(_LATER_NOTICES)

    telling = asyncio.create_task(tell())
    try:
        while True:
            found: dict[str, list[int]] = {}
            troubles = troubles or found
            nameless = silent = False
            for port in job.ports:
                if found and time.monotonic() - begin > options.join_timeout:
                    break  # where packets are dropped each try takes its time
                try:
                    return await _try(
                        topology.master_addr, port, options=options, job=job, hello=hello
                    )
                except (OSError, asyncio.TimeoutError, protocol.Stranger) as error:
                    found.setdefault(_why(error), []).append(port)
                    nameless, silent = (
                        isinstance(error, socket.gaierror),
                        isinstance(error, network.NoNameServerError),
                    )
                if nameless:
                    break  # whatever the port
            troubles = found
            waited = time.monotonic() - begin
            if given_up():
                raise GangError(f"node 0 did not start: {given_up()}")
            unknown = (
                nameless and topology.source in _FIXED_NAMES and (silent or waited > _NAMELESS)
            )
            if unknown or waited > options.join_timeout:
                raise GangError(f"{text()}; gave up after {waited:.0f} s")
            await asyncio.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 1.5)
    finally:
        telling.cancel()


async def _try(
    host: str, port: int, options: LaunchOptions, job: JobIdentity, hello: Message
) -> RemoteLead:
    # asyncio's own lookup could not be given up: it would hold up this agent's end.
    addresses = await asyncio.to_thread(network.addresses_of, host)
    for address in addresses:
        try:
            connecting = asyncio.open_connection(address, port, limit=protocol.LINE_BYTES)
            reader, writer = await asyncio.wait_for(connecting, _CONNECT_SECONDS)
            break
        except (OSError, asyncio.TimeoutError):
            if address == addresses[-1]:
                raise
    try:
        return RemoteLead(
            await protocol.greet_lead(reader, writer, token=job.token, hello=hello), options
        )
    except BaseException:
        writer.close()
        raise


def _why(error: BaseException) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return "no answer"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
