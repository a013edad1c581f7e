"""Who is there: lets in the agents that prove to be of this job, hears them, and notices those that are gone."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from clusterjob.errors import GangError
from clusterjob.node.events import EventLog
from clusterjob.node.gang import wire
from clusterjob.node.gang.wire import Channel, Message
from clusterjob.node.identity import JobIdentity
from clusterjob.node.options import LaunchOptions
from clusterjob.node.verdict import Failure

_FAREWELL_PATIENCE = 1.0  # for the other agents to hang up once they were told the end


@dataclass
class Peer:
    """One node's agent as the lead sees it."""

    node_rank: int
    host: str
    pid: int
    nproc: int
    send: Callable[[Message], None]
    heard_at: float
    endpoints: tuple[str, ...] = ()
    lost: bool = False
    stopped: bool = True
    done: bool = False


class Gathering:
    """The agents of a job, as they come to node 0 and go.

    Args:
        nnodes: how many there are to be.
        options: the heartbeat, and the silence after which a node is lost.
        job: the job's identity and secret.
        events: where it is noted who came, was refused or was no agent at all.

    Attributes:
        peers: the agents that have come, by node_rank.
        inbox: what they say, with who says it: `joined` first, and `lost` where one is gone.
        refusals: those that are of this job and do not belong into it, such as a second one with the same node_rank.
    """

    def __init__(self, nnodes: int, options: LaunchOptions, job: JobIdentity, events: EventLog) -> None:
        self.peers: dict[int, Peer] = {}
        self.inbox: asyncio.Queue[tuple[int, Message]] = asyncio.Queue()
        self.refusals: list[Failure] = []
        self._nnodes = nnodes
        self._options = options
        self._job = job
        self._events = events
        self._connections: set[asyncio.Task[None]] = set()

    async def open(self, listener: socket.socket, address: str) -> None:
        """Let agents in from now on.

        Args:
            listener: a socket that listens.
            address: its address, as the other nodes know it.
        """
        self._server = await asyncio.start_server(self._welcome, sock=listener, limit=wire.LINE_BYTES)
        self._events.add("listening", address=address, port=listener.getsockname()[1])
        self._beating = asyncio.create_task(self._beat())

    async def close(self) -> None:
        """Let nobody in any more, give the others a moment to hear the verdict and hang up, then hang up on the rest."""
        self._beating.cancel()
        self._server.close()
        if self._connections:
            await asyncio.wait(self._connections, timeout=_FAREWELL_PATIENCE)
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    def tell_all(self, message: Message) -> None:
        """Send a message to every agent that has come."""
        for peer in self.peers.values():
            peer.send(message)

    def join(self, hello: Message, send: Callable[[Message], None]) -> None:
        """Take in an agent that has proved to be of this job.

        Raises:
            wire.Refused: another agent has its place, or it is of another attempt or another world.
        """
        node_rank, host, pid = int(hello["node_rank"]), str(hello["host"]), int(hello["pid"])
        if int(hello["attempt"]) != self._job.attempt:
            raise wire.Refused(f"this is attempt {self._job.attempt} of the job, not {hello['attempt']}")
        problem, counted_by = "", str(hello.get("counted_by", ""))
        if int(hello["nnodes"]) != self._nnodes:
            problem = f"node {node_rank} on {host} (pid {pid}) counts {hello['nnodes']} nodes, node 0 counts {self._nnodes}"
        elif counted_by and self._job.counted_by and counted_by != self._job.counted_by:
            problem = (
                f"node {node_rank} on {host} (pid {pid}) is counted by {counted_by}, node 0 by {self._job.counted_by}: "
                "all nodes have to use the same index"
            )
        elif node_rank in self.peers:
            first = self.peers[node_rank]
            problem = f"node_rank {node_rank} is claimed twice: by {first.host} (pid {first.pid}) and by {host} (pid {pid})"
        if problem:
            self.refusals.append(Failure(None, None, node_rank, host, 1, None, problem))
            raise wire.Refused(problem)
        endpoints = tuple(map(str, hello.get("endpoints", ())))
        self.peers[node_rank] = Peer(node_rank, host, pid, int(hello["nproc"]), send, time.monotonic(), endpoints)
        self._events.add("joined", node_rank=node_rank, host=host, pid=pid, nproc=int(hello["nproc"]))
        self.inbox.put_nowait((node_rank, {"t": "joined"}))

    def hear(self, node_rank: int, message: Message) -> None:
        """Take in a message of an agent that has joined."""
        peer = self.peers[node_rank]
        peer.heard_at = time.monotonic()
        if message["t"] != "beat":
            self.inbox.put_nowait((node_rank, message))

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._converse(reader, writer)
        except asyncio.CancelledError:
            writer.transport.abort()  # by `close`; nobody waits for this task, so nobody is told
        finally:
            self._connections.discard(task)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            channel, hello = await wire.greet_member(reader, writer, self._job.token, self._job.job_id)
        except (GangError, OSError, asyncio.TimeoutError) as error:
            self._events.add("stranger", address=str(writer.get_extra_info("peername")), why=str(error) or "silent")
            writer.close()
            return
        try:
            self.join(hello, channel.send)
        except (wire.Refused, KeyError, ValueError, TypeError) as error:
            self._events.add("refused", why=str(error))
            channel.send({"t": "refused", "why": str(error)})
            await channel.close()
            return
        channel.send({"t": "welcome"})
        await self._listen_to(int(hello["node_rank"]), channel)

    async def _listen_to(self, node_rank: int, channel: Channel) -> None:
        try:
            while (message := await channel.receive()) is not None:
                self.hear(node_rank, message)
        except GangError as error:
            self._events.add("forged", node_rank=node_rank, why=str(error))
        self.inbox.put_nowait((node_rank, {"t": "lost", "why": "its connection was closed"}))
        await channel.close()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._options.heartbeat)
            for peer in self.peers.values():
                peer.send({"t": "beat"})
                silence = time.monotonic() - peer.heard_at
                if silence > self._options.lease and not peer.lost and peer.node_rank != 0:
                    self.inbox.put_nowait((peer.node_rank, {"t": "lost", "why": f"nothing was heard of it for {silence:.0f} s"}))
