"""Measure this node for the preflight, in a process that the forkserver starts."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable
from typing import Any

from clusterjob.node import preflight
from clusterjob.node.agent.state_report import StateReport
from clusterjob.node.decide import MEASURED
from clusterjob.node.environments import worker_variables
from clusterjob.node.environments.topology import Topology
from clusterjob.node.rendezvous.messages import PreflightFound
from clusterjob.node.states import Order, OrderWithStore
from clusterjob.node.workers import forkserver_messages
from clusterjob.node.workers.forkserver_client import ForkserverClient

_MAX_RESULT = 1 << 24  # bytes
_MARGIN = 5.0  # seconds for the result


async def measure(
    order: Order,
    topology: Topology,
    forkserver: ForkserverClient,
    report: StateReport,
    send: Callable[[Any], object],
) -> None:
    """Measure this node; the process ends with this call.

    Args:
        order: what the coordinator wants.
        topology: this node.
        forkserver: starts the process.
        report: the state of this node.
        send: hands the coordinator in this process the result of all nodes.
    """
    assert order.measure is not None
    if forkserver.error:
        report.set(measured=forkserver.error[:300])
        return
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    own.setblocking(False)
    variables = worker_variables.quiet_defaults(
        os.environ, topology.master_addr, nnodes=topology.nnodes
    )
    store = order.store if isinstance(order, OrderWithStore) else None
    seconds = order.measure.start_seconds + preflight.SECONDS + _MARGIN
    begin = json.dumps(vars(order.measure) | {"seconds": seconds}).encode()
    with own:
        forkserver.start_measuring(forkserver_messages.StartMeasuring(variables), other)
        socket.send_fds(own, [begin], [store.fileno()] if store is not None else [])
        if store is not None:
            store.close()
        data, loop = b"", asyncio.get_running_loop()
        while len(data) < _MAX_RESULT:
            try:
                part = await loop.sock_recv(own, 1 << 16)
            except OSError:
                part = b""
            if not part:
                break
            data += part
    report.set(measured=_how(data))
    if store is not None:
        send(PreflightFound(data))


def _how(data: bytes) -> str:
    """Return how the process has ended, by what it has sent."""
    try:
        error = json.loads(data).get("error", "")
    except (ValueError, AttributeError):
        return "it has ended; its log is preflight.log"
    return str(error)[:300] or MEASURED
