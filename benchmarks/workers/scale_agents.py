"""Simulate the agents of many nodes in one process: real frames, no workers.

One loop over epoll serves all connections, so that the agents cost less than the coordinator, which
is measured. Arguments: number of nodes, seconds from the start of the workers to the failure of the
last node's worker. stdin: the job's token. stdout: one JSON object with the times of
CLOCK_MONOTONIC.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import sys
import time
from dataclasses import dataclass, field

from clusterjob.node.stacks.grouping import Frame, RankStack, ThreadStack
from clusterjob.node.system import codec, processes
from clusterjob.node.verdict import Failure, FailureKind

PORT = int(os.environ.get("SCALE_PORT", "31999"))
HEARTBEAT = 2.0  # seconds
PAUSE = 0.2  # seconds until an agent connects again
TIMEOUT = 120.0  # seconds for everything


def sign(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"\0".join(parts), hashlib.sha256).hex().encode()


@dataclass
class Agent:
    """One agent: a connection that speaks the protocol of `clusterjob.node.rendezvous.protocol`."""

    node_rank: int
    connection: socket.socket | None = None
    nonce: str = ""
    send_key: bytes = b""
    receive_key: bytes = b""
    sent: int = 0
    received: int = 0
    buffer: bytes = b""
    state: str = "new"
    runs: bool = False  # whether its workers were started
    at: dict[str, float] = field(default_factory=dict)

    def write(self, payload: bytes) -> None:
        """Sign and send a message."""
        assert self.connection is not None
        line = sign(self.send_key, str(self.sent).encode(), payload) + b" " + payload + b"\n"
        self.sent += 1
        self.connection.send(line)


class Agents:
    """All agents but node 0's."""

    def __init__(self, nnodes: int, token: bytes, seconds: float) -> None:
        self.nnodes, self.token, self.seconds = nnodes, token, seconds
        self.agents = [Agent(rank) for rank in range(1, nnodes)]
        self.poll = select.epoll()
        self.by_fd: dict[int, Agent] = {}
        self.counts = {"welcome": 0, "started": 0, "stopped": 0, "ended": 0}
        self.times: dict[str, float] = {}
        self.retries: list[tuple[float, Agent]] = []
        self.tries = 0

    def connect(self, agent: Agent) -> None:
        """Begin to connect; the first line of the handshake follows when it is writable."""
        self.tries += 1
        agent.state, agent.buffer, agent.sent, agent.received = "connecting", b"", 0, 0
        agent.connection = socket.socket()
        agent.connection.setblocking(False)
        agent.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = agent.connection.connect_ex(("127.0.0.1", PORT))
        assert code in (0, errno.EINPROGRESS), os.strerror(code)
        self.by_fd[agent.connection.fileno()] = agent
        self.poll.register(agent.connection, select.EPOLLOUT)

    def close(self, agent: Agent) -> None:
        """Close a connection; connect again if the agent has not joined."""
        assert agent.connection is not None
        self.by_fd.pop(agent.connection.fileno(), None)
        self.poll.unregister(agent.connection)
        agent.connection.close()
        agent.connection = None
        if agent.state != "ended":
            if agent.state == "joined":
                raise SystemExit(f"node {agent.node_rank} lost the coordinator")
            self.retries.append((time.monotonic() + PAUSE, agent))

    def run(self) -> None:
        """Join, run, fail and end."""
        begin = self.times["begin"] = time.monotonic()
        for agent in self.agents:
            self.connect(agent)
        beat_at, position, fail_at = begin, 0, float("inf")
        while self.counts["ended"] < len(self.agents):
            for descriptor, _ in self.poll.poll(0.02, 1024):
                if (agent := self.by_fd.get(descriptor)) is not None:
                    self.on_event(agent)
            now = time.monotonic()
            if now > begin + TIMEOUT:
                raise SystemExit(f"timed out: {self.counts}")
            while self.retries and self.retries[0][0] <= now:
                self.connect(self.retries.pop(0)[1])
            # Every agent sends a heartbeat in each interval, one after another.
            due = int((now - beat_at) / HEARTBEAT * len(self.agents))
            for index in range(position, due):
                agent = self.agents[index % len(self.agents)]
                if agent.state == "joined":
                    agent.write(b'{"type": "Heartbeat"}')
            position = max(position, due)
            if self.counts["started"] == len(self.agents) and fail_at == float("inf"):
                self.times["all started"] = now
                fail_at = now + self.seconds
            if now >= fail_at and "failing" not in self.times:
                self.fail(self.agents[-1])

    def fail(self, agent: Agent) -> None:
        """Report that the worker of an agent has failed."""
        self.times["failing"] = time.monotonic()
        rank = agent.node_rank
        failure = Failure(
            rank,
            0,
            node_rank=rank,
            host=f"host{rank}",
            exit_code=1,
            signal=None,
            message="ValueError: boom",
            kind=FailureKind.CODE,
        )
        failing = [{"failure": codec.plain(failure), "age": 0.0, "exited": True}]
        agent.write(state(started=True, idle=False, failing=failing))

    def on_event(self, agent: Agent) -> None:
        """Continue a connection that is ready."""
        assert agent.connection is not None
        if agent.state == "connecting":
            if agent.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.close(agent)
                return
            agent.nonce = secrets.token_hex(16)
            opening = {"clusterjob": 1, "job": "scale", "nonce": agent.nonce}
            agent.connection.send(json.dumps(opening).encode() + b"\n")
            agent.state = "opened"
            self.poll.modify(agent.connection, select.EPOLLIN)
            return
        try:
            data = agent.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close(agent)
            return
        *lines, agent.buffer = (agent.buffer + data).split(b"\n")
        for line in lines:
            if agent.state == "opened":
                self.on_challenge(agent, json.loads(line))
            else:
                signature, _, payload = line.partition(b" ")
                number = str(agent.received).encode()
                assert signature == sign(agent.receive_key, number, payload)
                agent.received += 1
                self.on_message(agent, json.loads(payload))

    def on_challenge(self, agent: Agent, challenge: dict[str, str]) -> None:
        """Check the coordinator's proof, and say hello."""
        session = sign(self.token, b"session", agent.nonce.encode(), challenge["nonce"].encode())
        assert challenge["proof"].encode() == sign(session, b"coordinator")
        agent.send_key = sign(session, b"to coordinator")
        agent.receive_key = sign(session, b"from coordinator")
        agent.state = "joining"
        rank = agent.node_rank
        hello = {"type": "Hello", "node_rank": rank, "host": f"host{rank}", "pid": 1, "attempt": 0}
        agent.write(json.dumps(hello | {"nnodes": self.nnodes, "nproc": 1}).encode())

    def on_message(self, agent: Agent, message: dict[str, object]) -> None:
        """Answer a message of the coordinator."""
        name = message["type"]
        if name == "Welcome":
            agent.state = "joined"
            self.count("welcome")
        elif name == "Order":
            self.on_order(agent, message)
        elif name == "End":
            agent.state = "ended"
            self.count("ended")
            self.close(agent)
        elif name == "Refused":
            raise SystemExit(f"node {agent.node_rank} was refused: {message['why']}")

    def on_order(self, agent: Agent, order: dict[str, object]) -> None:
        """Do what the coordinator wants."""
        if order["stop"] is not None:
            self.count("stopped")
            agent.write(state(ended=True))
        elif order["collect"]:
            agent.write(stack_of(agent.node_rank))
            agent.write(state(started=True, idle=False, collected=True))
        elif order["world"] is not None and not agent.runs:
            agent.runs = True
            self.count("started")
            agent.write(state(started=True, idle=False))

    def count(self, what: str) -> None:
        """Count an agent; record the time of the last one."""
        self.counts[what] += 1
        if self.counts[what] == len(self.agents):
            self.times[what] = time.monotonic()


def state(**fields: object) -> bytes:
    """Return the state of a node in the first round."""
    return json.dumps({"type": "NodeState", "round": 0, **fields}).encode()


def stack_of(rank: int) -> bytes:
    frames = tuple(Frame(f"/home/user/train/part{n}.py", n + 1, f"function{n}") for n in range(8))
    threads = (ThreadStack("MainThread", frames),)
    stack = RankStack(
        rank, rank, f"host{rank}", pid=1, state="sleeps (poll)", answered=True, threads=threads
    )
    return json.dumps({"type": "StackFound", "restart": 0, "stack": codec.plain(stack)}).encode()


def main() -> None:
    processes.raise_open_files()
    agents = Agents(int(sys.argv[1]), sys.stdin.buffer.readline().strip(), float(sys.argv[2]))
    agents.run()
    cpu = time.process_time()
    print(json.dumps(agents.times | {"cpu": cpu, "tries": agents.tries}), flush=True)


if __name__ == "__main__":
    main()
