"""Membership: admit agents that prove the token, receive messages, detect lost agents.

A process that was stopped or suspended, or that got no CPU, received and sent nothing meanwhile: it
must not count a silent peer as lost (`Stalls`).
"""

from __future__ import annotations

import asyncio
import errno
import gc
import hmac
import resource
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from clusterjob.errors import RendezvousError
from clusterjob.node.contract import TOKEN
from clusterjob.node.logs.events import EventLog
from clusterjob.node.rendezvous import messages, protocol
from clusterjob.node.rendezvous.identity import NodeJob
from clusterjob.node.rendezvous.protocol import Channel
from clusterjob.node.states import Order
from clusterjob.node.system import network
from clusterjob.node.system.codec import MalformedMessageError
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import Failure

MAX_WAITING = 128  # unauthenticated connections, besides one for each agent that has not joined
_BACKLOG = 4096  # connections
# The part of those that may be unauthenticated which is accepted in one turn of the event loop. A
# connection is served, or dropped, some turns later; all at once would take every descriptor.
_TURN = 8


def listen(master_addr: str, ports: Sequence[int], *, alone: bool = False) -> socket.socket:
    """Return a socket that listens at the first free port.

    Args:
        master_addr: the address to bind.
        ports: the candidate ports.
        alone: whether the job has one node; then only this machine can connect.

    Raises:
        RendezvousError: no port is free, or the address does not resolve; the message has the
            kernel's error.
    """
    taken = []
    for port in ports:
        try:
            return network.listen_at(master_addr, port, backlog=_BACKLOG, alone=alone)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise RendezvousError(
                    f"node 0 cannot listen at {master_addr}:{port}: {error.strerror or error}"
                ) from error
            taken.append(str(port))
    raise RendezvousError(
        f"node 0 finds no free port at {master_addr}:"
        f" {', '.join(taken)} {'is' if len(taken) == 1 else 'are'} in use"
    )


class Stalls:
    """Measure for how long a process did not run; the process must call `tick` regularly.

    Args:
        interval: seconds between two calls; a call that is more than one interval late ends
            a stall.
        clock: seconds that also pass while the machine is suspended.

    Attributes:
        last: seconds of the latest stall.
    """

    def __init__(
        self,
        interval: float,
        clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self.last = 0.0
        self._interval = interval
        self._clock = clock
        self._ticked = clock()
        self._ended = float("-inf")

    def tick(self) -> float:
        """Record that this process runs; return the seconds of a stall that ends now, else 0."""
        moment = self._clock()
        elapsed, self._ticked = moment - self._ticked, moment
        if elapsed <= 2 * self._interval:
            return 0.0
        self.last, self._ended = elapsed, moment
        return elapsed

    def recent(self, seconds: float) -> float:
        """Return the seconds of a stall that ended within the last `seconds`, or now; else 0."""
        moment = self._clock()
        if moment - self._ticked > 2 * self._interval:
            return moment - self._ticked
        return self.last if moment - self._ended <= seconds else 0.0


_CLOSE_SECONDS = 1.0  # seconds for the other agents to close their connections
# Rejected connections that get an event each: a port scan must not fill the disk.
_MAX_REJECTED = 20
_RESOLVE_INTERVAL = 1.0  # seconds between two lookups of the names of all nodes


@dataclass
class Peer:
    """An agent that has joined.

    Attributes:
        hello: its first message; its texts are sanitized.
        send: sends it a message.
        heard_at: the monotonic time of its last message.
        reached_at: the coordinator's address to which it has connected, as the kernel writes it;
            empty for the agent of this process.
        order: the last order that it got; before the first one, nothing is wanted of it.
    """

    hello: messages.Hello
    send: Callable[[Any], None]
    heard_at: float
    reached_at: str = ""
    lost: bool = False
    order: Order = field(default_factory=Order)

    @property
    def node_rank(self) -> int:
        """The number of its node."""
        return self.hello.node_rank


class Membership:
    """The agents of a job that have joined.

    Args:
        node: the job, as the coordinator's node sees it.
        events: records who joined, and which connections were rejected.

    Attributes:
        peers: the agents that have joined, by the number of their node. A lost agent stays until
            another one joins for its node.
        inbox: (peer, message) in order of arrival: `Hello` first, `ConnectionLost` when an agent is
            gone.
        refusal: the first agent of this job that may not join, such as a second one with the same
            node_rank, as a failure.
        stalls: the times for which this process itself did not run.
    """

    def __init__(self, node: NodeJob, events: EventLog) -> None:
        self.peers: dict[int, Peer] = {}
        self.inbox: asyncio.Queue[tuple[Peer, Any]] = asyncio.Queue()
        self.refusal: Failure | None = None
        self._nnodes = node.topology.nnodes
        self._node = node
        self._job = node.identity
        self._events = events
        self.stalls = Stalls(node.options.heartbeat)
        self._serving: set[asyncio.Task[Any]] = set()
        # The addresses of unauthenticated peers, oldest first.
        self._waiting: dict[asyncio.Task[Any], str] = {}
        self._rejected = 0  # connections
        self._addresses: set[str] = set()  # of the nodes of an open job, as far as they resolved
        self._resolves_at = 0.0  # the time from which their names may be resolved again
        self._resolving = asyncio.Lock()
        self.tasks: list[asyncio.Task[None]] = []

    async def open(self, listener: socket.socket, address: str) -> None:
        """Accept agents from now on.

        Args:
            listener: a listening socket.
            address: the address at which the other nodes reach it.
        """
        self._events.add(
            "listening",
            address=address,
            port=listener.getsockname()[1],
            bound=listener.getsockname()[0],
            nnodes=self._nnodes,
        )
        # An order must not wait for the acknowledgement of the message before it. Connections have
        # the option of their listener; asyncio sets it only where the socket names its protocol.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._server = await asyncio.start_server(
            self._serve,
            sock=listener,
            backlog=max(1, self._max_waiting() // _TURN),  # to accept in one turn
            limit=protocol.LINE_BYTES,
        )
        listener.listen(_BACKLOG)
        self.tasks = [asyncio.create_task(self._find_silent())]

    async def close(self) -> None:
        """Stop accepting, wait up to 1 s for agents to read the verdict, close all connections."""
        for task in (*self.tasks, *self._waiting):
            task.cancel()
        self._server.close()
        if self._serving:
            await asyncio.wait(self._serving, timeout=_CLOSE_SECONDS)
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _max_waiting(self) -> int:
        """Return how many connections may be unauthenticated now."""
        # A round needs new descriptors. A dropped connection holds its own until its task has run.
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # negative: no limit
        most = self._nnodes - len(self.peers) + MAX_WAITING
        return max(1, min(most, files // 4) if files >= 0 else most)

    def _note_rejected(self, address: str, why: str) -> None:
        self._rejected += 1
        if self._rejected <= _MAX_REJECTED:
            self._events.add("unauthenticated", address=address, why=sanitize(why))

    def broadcast(self, message: Any) -> None:
        """Send a message to every agent that has joined."""
        for peer in self.peers.values():
            peer.send(message)

    def join(self, hello: messages.Hello, send: Callable[[Any], None]) -> Peer:
        """Admit an agent that has proved the token; return it.

        Args:
            hello: its first message.
            send: sends it a message.

        Raises:
            RefusedError: its node_rank is taken, or it belongs to another attempt or counts another
                number of nodes.
        """
        hello = replace(
            hello,
            host=sanitize(hello.host),
            address=sanitize(hello.address),
            endpoints=tuple(map(sanitize, hello.endpoints)),
        )
        node_rank, host, pid = hello.node_rank, hello.host, hello.pid
        if hello.attempt != self._job.attempt:
            raise protocol.RefusedError(
                f"this is attempt {self._job.attempt} of the job, not {hello.attempt}"
            )
        who = f"node {node_rank} on {host} (pid {pid})"
        problem = ""
        if hello.nnodes != self._nnodes:
            problem = f"{who} counts {hello.nnodes} nodes, node 0 counts {self._nnodes}"
        elif node_rank >= self._nnodes:
            problem = f"{who}: node_rank must be between 0 and {self._nnodes - 1}"
        elif (first := self.peers.get(node_rank)) is not None:
            is_same = hmac.compare_digest(ascii(hello.key), ascii(first.hello.key))
            if is_same and not first.lost:
                # It retries until its earlier connection counts as lost.
                lost = messages.ConnectionLost("its agent joins again", ended=True)
                self.inbox.put_nowait((first, lost))
                raise protocol.RefusedError(f"the earlier connection of {who} is not lost yet")
            if not is_same and (self._job.is_open or not first.lost):
                problem = (
                    f"node_rank {node_rank} is claimed twice:"
                    f" by {first.hello.host} (pid {first.hello.pid}) and by {host} (pid {pid})"
                )
        if problem:
            refusal = Failure.of_node(node_rank, host, message=problem)
            self.refusal = self.refusal or refusal
            raise protocol.RefusedError(problem)
        peer = self.peers[node_rank] = Peer(hello, send, heard_at=time.monotonic())
        if len(self.peers) == self._nnodes:
            gc.freeze()  # a collection would look at the objects of all connections again
        self._events.add("joined", node_rank=node_rank, host=host, pid=pid, nproc=hello.nproc)
        self.inbox.put_nowait((peer, hello))
        return peer

    def receive(self, peer: Peer, message: Any) -> None:
        """Put a message of an agent that has joined into the inbox."""
        peer.heard_at = time.monotonic()
        if isinstance(message, messages.Heartbeat):
            peer.send(message)
        else:
            self.inbox.put_nowait((peer, message))

    async def _foreign(self, writer: asyncio.StreamWriter) -> str:
        """Return the address of a peer that may not join an open job; empty if it may."""
        peers = self._job.peers
        if not peers:
            return ""
        address = network.plain_address(writer.get_extra_info("peername")[0])
        async with self._resolving:
            if address not in self._addresses and time.monotonic() > self._resolves_at:
                self._addresses |= await asyncio.to_thread(network.addresses_of_all, peers)
                self._resolves_at = time.monotonic() + _RESOLVE_INTERVAL
        return "" if address in self._addresses else address

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection; if too many are unauthenticated, close the oldest of them.

        An agent authenticates in milliseconds, and retries.
        """
        task = asyncio.current_task()
        assert task is not None
        address = self._waiting[task] = str(writer.get_extra_info("peername"))
        self._serving.add(task)
        try:
            if len(self._waiting) > self._max_waiting():
                oldest = next(iter(self._waiting))
                why = "too many unauthenticated connections"
                self._note_rejected(self._waiting.pop(oldest), why)
                oldest.cancel()
            peer, channel = await self._admit(reader, writer)
            self._waiting.pop(task, None)
            channel.send(messages.Welcome())
            await self._receive_from(peer, channel)
        except asyncio.CancelledError:
            pass  # the connection is closed below, and no task awaits this one
        except protocol.RefusedError as error:
            self._events.add("refused", why=error.message)
        except Exception as error:  # wrong input closes only this connection
            known = isinstance(error, (RendezvousError, OSError, asyncio.TimeoutError))
            why = str(error) or "it sent nothing"
            self._note_rejected(address, why if known else f"{type(error).__name__}: {error}")
        finally:
            writer.transport.abort()
            self._waiting.pop(task, None)
            self._serving.discard(task)

    async def _admit(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[Peer, Channel]:
        """Authenticate an agent, and let it join.

        Raises:
            RendezvousError, OSError, asyncio.TimeoutError: it may not join, or does not answer.
        """
        if address := await self._foreign(writer):
            why = f"{address} is no address of this job's nodes: {', '.join(self._job.peers)[:300]}"
            await protocol.refuse_address(reader, writer, f"{why}; set {TOKEN} on every node")
            raise protocol.UnauthenticatedError(why)
        channel, hello = await protocol.accept(
            reader, writer, token=self._job.token, job_id=self._job.job_id
        )
        try:
            peer = self.join(hello, channel.send)
        except protocol.RefusedError as error:
            channel.send(messages.Refused(error.message))
            await channel.close()
            raise
        peer.reached_at = writer.get_extra_info("sockname")[0]
        return peer, channel

    async def _receive_from(self, peer: Peer, channel: Channel) -> None:
        why, ended = "its connection was closed", True
        try:
            while (message := await channel.receive()) is not None and not peer.lost:
                messages.check_sender(message, peer.node_rank)
                self.receive(peer, message)
        except (RendezvousError, MalformedMessageError) as error:
            why, ended = f"it sent an invalid message: {error}", False
            self._events.add("forged", node_rank=peer.node_rank, why=str(error))
        if not peer.lost:
            self.inbox.put_nowait((peer, messages.ConnectionLost(why, ended=ended)))
        await channel.close()

    async def _find_silent(self) -> None:
        options = self._node.options
        own = self._node.topology.node_rank
        while True:
            await asyncio.sleep(options.heartbeat)
            if ended := self.stalls.tick():
                self._events.add("stalled", node_rank=own, seconds=round(ended, 1))
            # This process could not receive meanwhile, and the agents may have been frozen too.
            stalled = self.stalls.recent(2 * options.heartbeat)
            moment = time.monotonic()
            for node_rank, peer in self.peers.items():
                silence = moment - peer.heard_at
                if silence > options.lease and not (stalled or peer.lost or node_rank == own):
                    lost = messages.ConnectionLost(f"no message for {silence:.0f} s")
                    self.inbox.put_nowait((peer, lost))
