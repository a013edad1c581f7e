"""Run a real coordinator with node 0's agent, and report the cost of its process.

Arguments: number of nodes, job directory. stdin: the job's token. stdout: one JSON object per line,
with the CPU seconds and the memory of this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterjob.node.coordinator import Coordinator
from clusterjob.node.environments.topology import Topology
from clusterjob.node.notifications import Notifier
from clusterjob.node.options import LaunchOptions
from clusterjob.node.program import Program
from clusterjob.node.rendezvous import messages
from clusterjob.node.rendezvous.identity import JobIdentity, NodeJob
from clusterjob.node.rendezvous.membership import Membership, Peer
from clusterjob.node.states import NodeState, Order
from clusterjob.node.system import processes

PORT = int(os.environ.get("SCALE_PORT", "31999"))


def report(event: str) -> None:
    """Print what this process has used so far."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {
        "event": event,
        "at": time.monotonic(),
        "cpu": time.process_time(),
        "bytes": pages * resource.getpagesize(),
    }
    print(json.dumps(found), flush=True)


async def act_as_node_0(
    orders: asyncio.Queue[Any], membership: Membership, peer: Peer, joined: asyncio.Event
) -> None:
    """Answer the coordinator like an agent without workers."""
    known = -1
    while True:
        order = await orders.get()
        if not isinstance(order, Order):
            continue
        state = NodeState(order.round, started=True, idle=order.stop is not None)
        if order.world is not None and order.round > known:
            known = order.round
            report("started")
            membership.receive(peer, state)
            joined.set()
        if order.collect:
            membership.receive(peer, replace(state, collected=True))
        if order.stop is not None:
            report("stopping")
            membership.receive(peer, state)


async def main(nnodes: int, job_dir: Path, token: bytes) -> None:
    processes.raise_open_files()
    topology = Topology(nnodes, 0, 1, "127.0.0.1", PORT, "benchmark")
    node = NodeJob(
        topology,
        LaunchOptions(Program("script", "train.py")),
        JobIdentity("scale", 0, token, [PORT], has_torch=True),
        job_dir,
        print_line=lambda line: print(line, file=sys.stderr, flush=True),
    )
    notifier = Notifier("", "scale", job_dir, print_line=node.print_line)
    coordinator = Coordinator(node, watch=lambda _task: None, notifier=notifier)
    running = asyncio.create_task(coordinator.run())
    while not coordinator.membership.tasks:  # it listens when these run
        await asyncio.sleep(0)
    hello = messages.Hello(0, "host0", pid=os.getpid(), attempt=0, nnodes=nnodes, nproc=1)
    orders: asyncio.Queue[Any] = asyncio.Queue()
    peer = coordinator.membership.join(hello, orders.put_nowait)
    report("listening")
    joined = asyncio.Event()
    acting = asyncio.create_task(act_as_node_0(orders, coordinator.membership, peer, joined))
    waiting = asyncio.create_task(_report_heartbeats(joined))
    verdict = await running
    report("ended")
    print(verdict.text(), file=sys.stderr)
    for task in (acting, waiting):
        task.cancel()


async def _report_heartbeats(joined: asyncio.Event) -> None:
    """Report the cost twice while the workers run, when the agents only send heartbeats."""
    await joined.wait()
    seconds = float(os.environ.get("SCALE_IDLE", "6"))
    await asyncio.sleep(2.0)
    report("idle")
    await asyncio.sleep(seconds)
    report("idle again")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2]), sys.stdin.buffer.readline().strip()))
