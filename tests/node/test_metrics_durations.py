"""The durations in a node's end record, from the phases of its ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterjob.node.agent.node_metrics import NodeMetrics
from clusterjob.node.agent.node_workers import NodeWaits
from clusterjob.node.contract import World
from clusterjob.node.environments.topology import Topology
from clusterjob.node.logs.events import Phase, PhaseBegin, PhaseLog
from clusterjob.node.logs.log_files import Timeline, node_directory
from clusterjob.node.options import LaunchOptions
from clusterjob.node.program import Program
from clusterjob.node.rendezvous.identity import JobIdentity, NodeJob

BEGIN = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Replace the monotonic clock by the last number of a list."""
    now = [BEGIN]
    monkeypatch.setattr("clusterjob.node.agent.node_metrics.time.monotonic", lambda: now[-1])
    monkeypatch.setattr("clusterjob.node.system.devices.visible_gpus", lambda _: 0)
    yield now
    monkeypatch.undo()
    assert time.monotonic() != now[-1]


def world(restart: int) -> World:
    return World(
        restart=restart, master_addr="127.0.0.1", master_port=1, agent_store=True, node_rank=0,
        nnodes=1, nproc=2, first_rank=0, world_size=2,
    )  # fmt: skip


def metrics_of(job_dir: Path) -> NodeMetrics:
    node_directory(job_dir, 0).mkdir(parents=True)
    topology = Topology(
        node_rank=0, nnodes=1, nproc_per_node=2, master_addr="127.0.0.1", master_port=None,
        source="test",
    )  # fmt: skip
    options = LaunchOptions(Program("script", "x.py"), metrics=False)
    identity = JobIdentity("job", 1, b"token", [1], has_torch=False)
    workers: Any = SimpleNamespace(
        timeline=Timeline(node_directory(job_dir, 0)), alive_at=0.0, waits=NodeWaits()
    )
    return NodeMetrics(
        NodeJob(topology, options, identity, job_dir, print_line=print),
        forkserver=0,
        workers=workers,
    )


def test_durations_come_from_phases_by_the_monotonic_clock(
    tmp_path: Path, clock: list[float]
) -> None:
    log = PhaseLog(tmp_path, 0)
    metrics = metrics_of(tmp_path)
    for restart, at in ((0, 1010.0), (1, 1060.0)):
        clock.append(at)
        metrics.begin_round(world(restart))
    for phase, rank, restart, at, attempt in [
        (Phase.RUNNING, 0, 0, 10.0, 0),  # of the attempt before
        (Phase.SETUP, None, 0, 990.0, 1),
        (Phase.RUNNING, 0, 0, 1012.0, 1),
        (Phase.RUNNING, 1, 0, 1015.0, 1),
        (Phase.ENDED, 1, 0, 1055.0, 1),
        (Phase.ENDED, 0, 0, 1056.0, 1),
        (Phase.RUNNING, 0, 1, 1064.0, 1),
        (Phase.RUNNING, 1, 1, 1065.0, 1),
        (Phase.ENDED, 0, 1, 1160.0, 1),
        (Phase.ENDED, 1, 1, 1170.0, 1),
    ]:
        # The wall clock jumps: nothing depends on it.
        log.add(PhaseBegin(phase, rank, restart, attempt=attempt, time=at * -7, monotonic=at))
    log.add(PhaseBegin(Phase.RUNNING, 1, 1, 1, time=0, monotonic=1150, detail="first output"))
    clock.append(1172.0)
    assert metrics.end() == {
        "visible_gpus": 0,
        "wall": 182.0,
        "waited": 20.0,
        "startup": 25.0,
        "restarts": 1,
        "restart_seconds": 10.0,
        "ran": {"0": 100.0, "1": 110.0},
    }


def test_durations_without_phases_are_those_of_the_agent(
    tmp_path: Path, clock: list[float]
) -> None:
    metrics = metrics_of(tmp_path)
    clock.append(1004.0)
    assert metrics.end() == {
        "visible_gpus": 0, "wall": 4.0, "waited": 4.0, "startup": None, "restarts": 0,
        "restart_seconds": 0.0, "ran": {},
    }  # fmt: skip
    clock.append(1010.0)
    metrics.begin_round(world(0))
    clock.append(1030.0)
    found = metrics.end()
    assert (found["wall"], found["waited"], found["startup"]) == (30.0, 10.0, 10.0)
