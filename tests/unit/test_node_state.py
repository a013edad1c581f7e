"""How orders and lost processes change the state that an agent reports of its node."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from clusterjob.node.agent.node_workers import NodeWorkers, StackReports
from clusterjob.node.agent.state_report import StateReport
from clusterjob.node.contract import World
from clusterjob.node.environments.topology import Topology
from clusterjob.node.logs.console import Console
from clusterjob.node.options import LaunchOptions
from clusterjob.node.program import Program
from clusterjob.node.rendezvous.identity import JobIdentity, NodeJob
from clusterjob.node.states import Order
from clusterjob.node.system import crashes
from clusterjob.node.workers.forkserver_client import ForkserverClient


def test_node_that_fails_before_the_first_round_says_so_when_the_round_begins(
    tmp_path: Path,
) -> None:
    topology = Topology(
        node_rank=0, nnodes=1, nproc_per_node=1, master_addr="127.0.0.1,fd00::1", master_port=None,
        source="test",
    )  # fmt: skip
    options = LaunchOptions(Program("script", "x.py"))
    identity = JobIdentity("job", 0, b"token", [1], has_torch=False)
    node = NodeJob(topology, options, identity, tmp_path, print_line=print)
    world = World(
        restart=0, master_addr="127.0.0.1", master_port=1, agent_store=True, node_rank=0, nnodes=1,
        nproc=1, first_rank=0, world_size=1,
    )  # fmt: skip
    agent_end, forkserver_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    workers = NodeWorkers(
        node,
        ForkserverClient(os.getpid(), agent_end),
        console := Console(None, numbered=False, note=None),
        report := StateReport(),
    )
    workers.fail_node("srun was killed")
    assert not report.now().failing
    report.begin(0)
    workers.start(Order(0, world=world))
    assert [each.failure.message for each in report.now().failing] == ["srun was killed"]
    console.close()
    agent_end.close()
    forkserver_end.close()


def test_node_takes_a_sample_for_each_number_and_none_when_the_stop_asks_for_none() -> None:
    async def sampled(*orders: Order) -> list[int]:
        report, done, found = StateReport(), Order(0), []
        report.begin(0)
        workers: Any = SimpleNamespace(signs_of_life=lambda: (0.0, -1))
        unused: Any = None
        reports = StackReports(
            os.getpid(),  # it has no table of workers
            0,
            workers=workers,
            connection=unused,
            report=report,
            crashes=crashes.Crashes(),
        )
        for order in orders:
            reports.follow(order, done)
            done = order
            report.changed.clear()
            try:
                await asyncio.wait_for(report.changed.wait(), 1.0)
                found.append(report.state.sampled)
            except asyncio.TimeoutError:
                found.append(-1)
        return found

    orders = Order(0, sample=1), Order(0, sample=2), Order(0, sample=2), Order(0)
    assert asyncio.run(sampled(*orders)) == [1, 2, -1, -1]
