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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clusterjob.errors import RendezvousError
from clusterjob.node.contract import TOKEN
from clusterjob.node.logs.events import EventLog
from clusterjob.node.options import LaunchOptions
from clusterjob.node.rendezvous import messages, protocol
from clusterjob.node.rendezvous.identity import JobIdentity
from clusterjob.node.rendezvous.protocol import Channel
from clusterjob.node.system import network
from clusterjob.node.system.codec import MalformedMessageError
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import Failure

MAX_WAITING = 128  # unauthenticated connections, besides one for each agent that has not joined
_BACKLOG = 4096  # connections
_PAUSE = 0.1  # seconds after a failed accept(2), for example without free descriptors

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


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


class Acceptor:
    """Accept connections and serve each in its own task.

    It replaces asyncio.start_server, which sets the backlog to 100 and accepts all waiting
    connections before the first handler runs: a thousand idle connections would take every
    descriptor of this process. No error of accept(2) ends the job.

    Args:
        listener: a listening socket.
        handle: serves a connection until its end.
        max_waiting: returns how many connections may be unauthenticated now. If there are more,
            the oldest is closed: an agent authenticates in milliseconds, and retries.
        dropped: called with the address and the reason when a connection is closed.
    """

    def __init__(
        self,
        listener: socket.socket,
        handle: Handler,
        max_waiting: Callable[[], int],
        dropped: Callable[[str, str], None],
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._handle = handle
        self._max_waiting = max_waiting
        self._dropped = dropped
        # The addresses of unauthenticated peers, oldest first.
        self._waiting: dict[asyncio.Task[None], str] = {}
        self._all: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Accept connections until this task is cancelled."""
        loop = asyncio.get_running_loop()
        accepted = 0  # since other tasks ran
        while True:
            try:
                connection, address = await loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno != errno.ECONNABORTED:
                    self._drop_oldest(f"accept: {error.strerror or error}")
                    await asyncio.sleep(_PAUSE)
                continue
            task = asyncio.create_task(self._serve_one(connection))
            self._waiting[task] = str(address)
            self._all.add(task)
            if len(self._waiting) > max(1, self._max_waiting()):
                self._drop_oldest("too many unauthenticated connections")
            accepted += 1
            # sock_accept does not yield while connections wait. With one at a time, thousands of
            # agents that connect at once would fill the backlog, and the kernel drops the others.
            # But a connection must be read before enough others come to drop it as the oldest.
            if accepted >= self._max_waiting() // 2:
                accepted = 0
                await asyncio.sleep(0)

    def admit(self) -> None:
        """Count the current task's connection as authenticated."""
        task = asyncio.current_task()
        if task is not None:
            self._waiting.pop(task, None)

    async def close(self, timeout: float) -> None:
        """Close the listener, and after `timeout` seconds all connections that are still open."""
        self._listener.close()
        for task in list(self._waiting):
            task.cancel()
        if self._all:
            await asyncio.wait(self._all, timeout=timeout)
        for task in self._all:
            task.cancel()
        if self._all:
            await asyncio.wait(self._all)

    def _drop_oldest(self, why: str) -> None:
        oldest = next(iter(self._waiting), None)
        if oldest is not None:
            self._dropped(self._waiting.pop(oldest), why)
            oldest.cancel()

    async def _serve_one(self, connection: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_connection(
                sock=connection, limit=protocol.LINE_BYTES
            )
            await self._handle(reader, writer)
        except asyncio.CancelledError:
            pass  # the connection is closed below, and no task awaits this one
        except Exception as error:  # wrong input closes only this connection
            self._dropped(str(self._waiting.get(task, "")), f"{type(error).__name__}: {error}")
        finally:
            if writer is None:
                connection.close()
            else:
                writer.transport.abort()
            self._waiting.pop(task, None)
            self._all.discard(task)


class Stalls:
    """Measure for how long a process did not run; the process must call `tick` regularly.

    Args:
        interval: seconds between two calls; a call that is more than one interval late ends
            a stall.
        clock: seconds that also pass while the machine is suspended.

    Attributes:
        total: seconds of all stalls so far.
        last: seconds of the latest stall.
    """

    def __init__(
        self,
        interval: float,
        clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self.total = self.last = 0.0
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
        self.total += elapsed
        return elapsed

    def recent(self, seconds: float) -> float:
        """Return the seconds of the latest stall if it ended within the last `seconds`, else 0."""
        self.tick()
        return self.last if self._clock() - self._ended <= seconds else 0.0


_CLOSE_SECONDS = 1.0  # seconds for the other agents to close their connections
_MAX_REJECTED = 20  # rejected connections that get an event each; later ones are counted
_RESOLVE_INTERVAL = 1.0  # seconds between two lookups of the names of all nodes
_REJECTED_INTERVAL = 10.0  # seconds between two events that count rejected connections


@dataclass
class Peer:
    """An agent that has joined.

    Attributes:
        hello: its first message; its texts are sanitized.
        send: sends it a message.
        heard_at: the monotonic time of its last message.
        reached_at: the coordinator's address to which it has connected.
    """

    hello: messages.Hello
    send: Callable[[Any], None]
    heard_at: float
    reached_at: str = ""
    lost: bool = False


class Membership:
    """The agents of a job that have joined.

    Args:
        nnodes: the number of agents that may join.
        own: the node of the coordinator.
        options: the heartbeat interval and the lease, in seconds.
        job: the job's identity and secret.
        events: records who joined, and which connections were rejected.

    Attributes:
        peers: the agents that have joined, by the number of their node. A lost agent stays until
            another one joins for its node.
        inbox: (node_rank, message) in order of arrival: `Hello` first, `ConnectionLost` when an
            agent is gone.
        refusals: agents of this job that may not join, such as a second one with the same
            node_rank.
        stalls: the times for which this process itself did not run.
    """

    def __init__(
        self, nnodes: int, own: int, options: LaunchOptions, job: JobIdentity, events: EventLog
    ) -> None:
        self.peers: dict[int, Peer] = {}
        self.inbox: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self.refusals: list[Failure] = []
        self._nnodes = nnodes
        self._own = own
        self._options = options
        self._job = job
        self._events = events
        self.stalls = Stalls(options.heartbeat)
        self._rejected = 0  # connections with an event
        self._uncounted = 0  # rejected connections since the last event
        self._addresses: set[str] = set()  # of the nodes of an open job, as far as they resolved
        self._resolves_at = 0.0  # the time from which their names may be resolved again
        self._resolving = asyncio.Lock()
        self.tasks: list[asyncio.Task[None]] = []
        self._rejected_at = float("-inf")

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
        self._acceptor = Acceptor(
            listener, self._serve, max_waiting=self._max_waiting, dropped=self._note_rejected
        )
        self.tasks = [
            asyncio.create_task(self._acceptor.serve()),
            asyncio.create_task(self._send_heartbeats()),
        ]

    async def close(self) -> None:
        """Stop accepting, wait up to 1 s for agents to read the verdict, close all connections."""
        for task in self.tasks:
            task.cancel()
        # `_acceptor.serve` must end before the listener is closed: its descriptor may be reused.
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self._uncounted:
            self._events.add("unauthenticated", more=self._uncounted)
        if self.tasks:
            await self._acceptor.close(_CLOSE_SECONDS)

    def _max_waiting(self) -> int:
        # A round needs new descriptors. A dropped connection holds its own until its task has run.
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # negative: no limit
        most = self._nnodes - len(self.peers) + MAX_WAITING
        return min(most, files // 4) if files >= 0 else most

    def _note_rejected(self, address: str, why: str) -> None:
        """Record a rejected connection; after the first 20, one event in 10 s.

        Each later event counts the connections since the last one. A port scan must not fill the
        disk.
        """
        moment = time.monotonic()
        each = self._rejected < _MAX_REJECTED
        if not each and moment - self._rejected_at < _REJECTED_INTERVAL:
            self._uncounted += 1
            return
        count = {} if each else {"more": self._uncounted}
        self._events.add("unauthenticated", address=address, why=sanitize(why), **count)
        self._uncounted = 0
        self._rejected += 1
        self._rejected_at = moment

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
            counted_by=sanitize(hello.counted_by),
            address=sanitize(hello.address),
            endpoints=tuple(map(sanitize, hello.endpoints)),
        )
        node_rank, host, pid, counted_by = hello.node_rank, hello.host, hello.pid, hello.counted_by
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
        elif counted_by and self._job.counted_by and counted_by != self._job.counted_by:
            problem = (
                f"{who} reads its node_rank from {counted_by}, node 0 from {self._job.counted_by}:"
                " all nodes must use the same variable"
            )
        elif (first := self.peers.get(node_rank)) is not None:
            is_same = hmac.compare_digest(ascii(hello.key), ascii(first.hello.key))
            if is_same and not first.lost:
                # It retries until its earlier connection counts as lost.
                self.inbox.put_nowait(
                    (node_rank, messages.ConnectionLost("its agent joins again", ended=True))
                )
                raise protocol.RefusedError(f"the earlier connection of {who} is not lost yet")
            if not is_same and (self._job.is_open or not first.lost):
                problem = (
                    f"node_rank {node_rank} is claimed twice:"
                    f" by {first.hello.host} (pid {first.hello.pid}) and by {host} (pid {pid})"
                )
        if problem:
            if len(self.refusals) < _MAX_REJECTED:
                self.refusals.append(Failure.of_node(node_rank, host, message=problem))
            raise protocol.RefusedError(problem)
        peer = self.peers[node_rank] = Peer(hello, send, heard_at=time.monotonic())
        if len(self.peers) == self._nnodes:
            gc.freeze()  # a collection would look at the objects of all connections again
        self._events.add("joined", node_rank=node_rank, host=host, pid=pid, nproc=hello.nproc)
        self.inbox.put_nowait((node_rank, hello))
        return peer

    async def next_message(self, timeout: float) -> tuple[int, Any] | None:
        """Return the next message and its sender's node_rank; None after `timeout` seconds."""
        if not self.inbox.empty():
            return self.inbox.get_nowait()
        try:
            return await asyncio.wait_for(self.inbox.get(), max(0.0, timeout))
        except asyncio.TimeoutError:
            return None

    def wake(self) -> None:
        """Let `next_message` return; the message has no content."""
        self.inbox.put_nowait((self._own, messages.Heartbeat()))

    def receive(self, node_rank: int, message: Any) -> None:
        """Put a message of an agent that has joined into the inbox."""
        self.peers[node_rank].heard_at = time.monotonic()
        if not isinstance(message, messages.Heartbeat):
            self.inbox.put_nowait((node_rank, message))

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
        if address := await self._foreign(writer):
            why = f"{address} is no address of this job's nodes: {', '.join(self._job.peers)[:300]}"
            self._note_rejected(address, why)
            await protocol.refuse_address(reader, writer, f"{why}; set {TOKEN} on every node")
            return
        try:
            channel, hello = await protocol.accept(
                reader, writer, token=self._job.token, job_id=self._job.job_id
            )
        except protocol.RefusedError as error:
            self._events.add("refused", why=error.message)
            return
        except (RendezvousError, OSError, asyncio.TimeoutError) as error:
            address = str(writer.get_extra_info("peername"))
            self._note_rejected(address, str(error) or "it sent nothing")
            return
        self._acceptor.admit()
        try:
            peer = self.join(hello, channel.send)
            peer.reached_at = network.plain_address(writer.get_extra_info("sockname")[0])
        except protocol.RefusedError as error:
            self._events.add("refused", why=error.message)
            await protocol.refuse(channel, error.message)
            return
        channel.send(messages.Welcome())
        await self._receive_from(peer, channel)

    async def _receive_from(self, peer: Peer, channel: Channel) -> None:
        node_rank, why, ended = peer.hello.node_rank, "its connection was closed", True
        try:
            while (message := await channel.receive()) is not None and not peer.lost:
                messages.check_sender(message, node_rank)
                self.receive(node_rank, message)
        except (RendezvousError, MalformedMessageError) as error:
            why, ended = f"it sent an invalid message: {error}", False
            self._events.add("forged", node_rank=node_rank, why=str(error))
        if not peer.lost:
            self.inbox.put_nowait((node_rank, messages.ConnectionLost(why, ended=ended)))
        await channel.close()

    async def _send_heartbeats(self) -> None:
        heartbeat, known = messages.Heartbeat(), self.stalls.total
        while True:
            await asyncio.sleep(self._options.heartbeat)
            self.stalls.tick()
            # A decision may have noticed the stall first.
            stalled, known = self.stalls.total - known, self.stalls.total
            if stalled:
                self._events.add("stalled", node_rank=self._own, seconds=round(stalled, 1))
            moment = time.monotonic()
            for node_rank, peer in self.peers.items():
                peer.send(heartbeat)
                if stalled:
                    peer.heard_at = moment  # this process could not receive meanwhile
                silence = moment - peer.heard_at
                if silence > self._options.lease and not peer.lost and node_rank != self._own:
                    lost = messages.ConnectionLost(f"no message for {silence:.0f} s")
                    self.inbox.put_nowait((node_rank, lost))
