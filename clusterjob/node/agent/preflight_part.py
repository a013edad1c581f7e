"""An agent's part of the preflight: start the measuring process, pass on messages."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from clusterjob.node.environments import worker_defaults
from clusterjob.node.environments.topology import Topology
from clusterjob.node.preflight import preflight_messages as messages
from clusterjob.node.preflight.measuring_process import PACKET_BYTES
from clusterjob.node.system.codec import MalformedMessageError
from clusterjob.node.workers import forkserver_messages
from clusterjob.node.workers.forkserver_client import ForkserverClient


class PreflightPart:
    """The preflight of one node.

    Args:
        topology: this node.
        forkserver: starts the measuring process.
        send: sends a message to the coordinator.

    Attributes:
        handlers: the function for each message of the coordinator.
    """

    def __init__(
        self, topology: Topology, forkserver: ForkserverClient, send: Callable[[Any], object]
    ) -> None:
        self._topology = topology
        self._forkserver = forkserver
        self._send = send
        self._process: socket.socket | None = None  # the connection to the measuring process
        self.handlers: dict[type, Callable[[Any], None]] = {
            messages.BeginPreflight: self._begin,
            messages.BeginPreflightWithStore: self._begin,
            messages.MeasureHost: self._pass_on,
            messages.MeasureGroup: self._pass_on,
            messages.ReadClock: self._read_clock,
            messages.EndPreflight: lambda _end: self.close(),
        }

    def close(self) -> None:
        """Close the connection to the measuring process, which then exits."""
        if self._process is not None:
            asyncio.get_running_loop().remove_reader(self._process)
            self._process.close()
            self._process = None

    def _begin(self, order: messages.BeginPreflight) -> None:
        self.close()
        if self._forkserver.error:
            self._send(messages.MeasuringEnded(self._forkserver.error[:300]))
            return
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.setblocking(False)
        self._process = own
        variables = worker_defaults.quiet_defaults(
            os.environ, self._topology.master_addr, nnodes=self._topology.nnodes
        )
        self._forkserver.start_measuring(forkserver_messages.StartMeasuring(variables), other)
        begin = messages.BeginPreflight(order.seconds, order.address, order.port)
        descriptors = []
        if isinstance(order, messages.BeginPreflightWithStore):
            descriptors = [order.store.fileno()]
        socket.send_fds(own, [_encode(begin)], descriptors)
        if isinstance(order, messages.BeginPreflightWithStore):
            order.store.close()
        asyncio.get_running_loop().add_reader(own, self._receive)

    def _pass_on(self, order: messages.MeasureHost | messages.MeasureGroup) -> None:
        if self._process is None:
            return  # the coordinator was told that the process has ended
        try:
            self._process.send(_encode(order))
        except OSError:
            self._end("it does not read its orders")

    def _read_clock(self, order: messages.ReadClock) -> None:
        self._send(messages.ClockRead(order.number, time.time_ns() // 1000))

    def _receive(self) -> None:
        assert self._process is not None
        try:
            data = self._process.recv(PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end("it has ended; its log is preflight.log")
            return
        try:
            self._send(messages.FROM_PROCESS.decode(json.loads(data)))
        except MalformedMessageError as error:
            self._end(f"its answer is invalid: {error}")

    def _end(self, why: str) -> None:
        self.close()
        self._send(messages.MeasuringEnded(f"the measuring process: {why}"[:300]))


def _encode(message: Any) -> bytes:
    return json.dumps(messages.TO_PROCESS.encode(message)).encode()
