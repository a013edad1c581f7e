"""Who is there: lets in the agents that prove to be of this job, hears them, and notices those that
are gone.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from clusterjob.errors import GangError
from clusterjob.node.logs.events import EventLog
from clusterjob.node.options import LaunchOptions
from clusterjob.node.rendezvous import messages, protocol
from clusterjob.node.rendezvous.acceptor import MOST_WAITING, Acceptor
from clusterjob.node.rendezvous.identity import JobIdentity
from clusterjob.node.rendezvous.protocol import Channel, Message
from clusterjob.node.rendezvous.stalls import Stalls
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import Failure

_FAREWELL_PATIENCE = 1.0  # for the other agents to hang up once they were told the end
_MOST_STRANGERS = 20  # that are noted one by one; later ones are counted
_STRANGERS_PAUSE = 10.0  # seconds between two notes of how many more there were


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
    wants_endpoints: bool = False
    lost: bool = False


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
        refusals: those that are of this job and do not belong into it, such as a second one with
            the same node_rank.
        stalls: when this process itself did not run.
    """

    def __init__(
        self, nnodes: int, options: LaunchOptions, job: JobIdentity, events: EventLog
    ) -> None:
        self.peers: dict[int, Peer] = {}
        self.inbox: asyncio.Queue[tuple[int, Message]] = asyncio.Queue()
        self.refusals: list[Failure] = []
        self._nnodes = nnodes
        self._options = options
        self._job = job
        self._events = events
        self.stalls = Stalls(options.heartbeat)
        self._strangers = 0  # noted so far
        self._uncounted = 0  # since the last note
        self.tasks: list[asyncio.Task[None]] = []
        self._noted_at = float("-inf")

    async def open(self, listener: socket.socket, address: str) -> None:
        """Let agents in from now on.

        Args:
            listener: a socket that listens.
            address: its address, as the other nodes know it.
        """
        self._events.add(
            "listening",
            address=address,
            port=listener.getsockname()[1],
            bound=listener.getsockname()[0],
        )
        self._acceptor = Acceptor(
            listener, self._converse, most_waiting=self._most_waiting, dropped=self._note_stranger
        )
        self.tasks = [
            asyncio.create_task(self._acceptor.serve()),
            asyncio.create_task(self._beat()),
        ]

    async def close(self) -> None:
        """Let nobody in any more, give the others a moment to hear the verdict and hang up, then
        hang up on the rest.
        """
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(
            *self.tasks, return_exceptions=True
        )  # before the listener's descriptor may be another's
        if self._uncounted:
            self._events.add("stranger", more=self._uncounted)
        if self.tasks:
            await self._acceptor.close(_FAREWELL_PATIENCE)

    def _most_waiting(self) -> int:
        return self._nnodes - len(self.peers) + MOST_WAITING

    def _note_stranger(self, address: str, why: str) -> None:
        """Note a connection that was no agent's; of many, how many there were: strangers must not
        fill the job's disk.
        """
        moment = time.monotonic()
        if self._strangers < _MOST_STRANGERS:
            self._events.add("stranger", address=address, why=sanitize(why))
        elif moment - self._noted_at < _STRANGERS_PAUSE:
            self._uncounted += 1
            return
        else:
            self._events.add("stranger", address=address, why=sanitize(why), more=self._uncounted)
            self._uncounted = 0
        self._strangers += 1
        self._noted_at = moment

    def tell_all(self, message: Message) -> None:
        """Send a message to every agent that has come."""
        for peer in self.peers.values():
            peer.send(message)

    def join(self, hello: Message, send: Callable[[Message], None]) -> None:
        """Take in an agent that has proved to be of this job.

        Raises:
            wire.Refused: another agent has its place, or it is of another attempt or another world.
        """
        own = messages.read_hello(hello)
        node_rank, host, pid, counted_by = own.node_rank, own.host, own.pid, own.counted_by
        if own.attempt != self._job.attempt:
            raise protocol.Refused(
                f"this is attempt {self._job.attempt} of the job, not {own.attempt}"
            )
        problem = ""
        if own.nnodes != self._nnodes:
            problem = f"node {node_rank} on {host} (pid {pid}) counts {own.nnodes} nodes, node 0 counts {self._nnodes}"
        elif node_rank >= self._nnodes:
            problem = f"node {node_rank} on {host} (pid {pid}) is none of {self._nnodes} nodes, which count from 0"
        elif counted_by and self._job.counted_by and counted_by != self._job.counted_by:
            problem = (
                f"node {node_rank} on {host} (pid {pid}) is counted by {counted_by}, node 0 by {self._job.counted_by}: "
                "all nodes have to use the same index"
            )
        elif node_rank in self.peers:
            first = self.peers[node_rank]
            problem = f"node_rank {node_rank} is claimed twice: by {first.host} (pid {first.pid}) and by {host} (pid {pid})"
        if problem:
            if len(self.refusals) < _MOST_STRANGERS:
                self.refusals.append(
                    Failure(
                        None,
                        None,
                        node_rank=node_rank,
                        host=host,
                        exit_code=1,
                        signal=None,
                        message=problem,
                    )
                )
            raise protocol.Refused(problem)
        self.peers[node_rank] = Peer(
            node_rank,
            host,
            pid=pid,
            nproc=own.nproc,
            send=send,
            heard_at=time.monotonic(),
            endpoints=own.endpoints,
            wants_endpoints=own.wants_endpoints,
        )
        self._events.add("joined", node_rank=node_rank, host=host, pid=pid, nproc=own.nproc)
        self.inbox.put_nowait((node_rank, {"t": "joined"}))

    def hear(self, node_rank: int, message: Message) -> None:
        """Take in a message of an agent that has joined."""
        peer = self.peers[node_rank]
        peer.heard_at = time.monotonic()
        if message["t"] != "beat":
            self.inbox.put_nowait((node_rank, message))

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            channel, hello = await protocol.greet_member(
                reader, writer, token=self._job.token, job=self._job.job_id
            )
        except (GangError, OSError, asyncio.TimeoutError) as error:
            self._note_stranger(str(writer.get_extra_info("peername")), str(error) or "silent")
            return
        self._acceptor.admit()
        try:
            self.join(hello, channel.send)
        except (protocol.Refused, messages.MalformedMessageError) as error:
            self._events.add("refused", why=str(error))
            channel.send({"t": "refused", "why": str(error)})
            await channel.close()
            return
        channel.send({"t": "welcome"})
        await self._listen_to(int(hello["node_rank"]), channel)

    async def _listen_to(self, node_rank: int, channel: Channel) -> None:
        why = "its connection was closed"
        try:
            while (message := await channel.receive()) is not None:
                messages.check(message, node_rank)
                self.hear(node_rank, message)
        except (GangError, messages.MalformedMessageError) as error:
            why = f"it sent what no agent sends: {error}"
            self._events.add("forged", node_rank=node_rank, why=str(error))
        self.inbox.put_nowait((node_rank, {"t": "lost", "why": why}))
        await channel.close()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._options.heartbeat)
            stalled = self.stalls.tick()
            if stalled:
                self._events.add("stalled", node_rank=0, seconds=round(stalled, 1))
            moment = time.monotonic()
            for peer in self.peers.values():
                peer.send({"t": "beat"})
                if stalled:
                    peer.heard_at = moment  # this process has heard nobody meanwhile, whoever spoke
                silence = moment - peer.heard_at
                if silence > self._options.lease and not peer.lost and peer.node_rank != 0:
                    self.inbox.put_nowait(
                        (
                            peer.node_rank,
                            {"t": "lost", "why": f"nothing was heard of it for {silence:.0f} s"},
                        )
                    )
