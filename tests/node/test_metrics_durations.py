"""The durations in a node's end record, from the phases of its ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterjob.node.agent.node_metrics import durations
from clusterjob.node.environments.topology import Topology
from clusterjob.node.logs.events import Phase, PhaseBegin, PhaseLog
from clusterjob.node.logs.log_files import node_directory
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


def node_of(job_dir: Path) -> NodeJob:
    node_directory(job_dir, 0).mkdir(parents=True)
    topology = Topology(
        node_rank=0, nnodes=1, nproc_per_node=2, master_addr="127.0.0.1", master_port=None,
        source="test",
    )  # fmt: skip
    options = LaunchOptions(Program("script", "x.py"), metrics=False)
    identity = JobIdentity("job", 1, b"token", [1], has_torch=False)
    return NodeJob(topology, options, identity, job_dir, print_line=print)


def test_durations_come_from_phases_by_the_monotonic_clock(
    tmp_path: Path, clock: list[float]
) -> None:
    log = PhaseLog(tmp_path, 0)
    node = node_of(tmp_path)
    for phase, rank, restart, at, attempt in [
        (Phase.RUNNING, 0, 0, 10.0, 0),  # of the attempt before
        (Phase.SETUP, None, 0, 990.0, 1),
        (Phase.RUNNING, None, 0, 1010.0, 1),
        (Phase.RUNNING, 0, 0, 1012.0, 1),
        (Phase.RUNNING, 1, 0, 1015.0, 1),
        (Phase.ENDED, 1, 0, 1055.0, 1),
        (Phase.ENDED, 0, 0, 1056.0, 1),
        (Phase.RUNNING, None, 1, 1060.0, 1),
        (Phase.RUNNING, 0, 1, 1064.0, 1),
        (Phase.RUNNING, 1, 1, 1065.0, 1),
        (Phase.ENDED, 0, 1, 1160.0, 1),
        (Phase.ENDED, 1, 1, 1170.0, 1),
    ]:
        # The wall clock jumps: nothing depends on it.
        log.add(PhaseBegin(phase, rank, restart, attempt=attempt, time=at * -7, monotonic=at))
    log.add(PhaseBegin(Phase.RUNNING, 1, 1, 1, time=0, monotonic=1150, detail="first output"))
    clock.append(1172.0)
    assert durations(node, BEGIN) == {
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
    clock.append(1004.0)
    assert durations(node_of(tmp_path), BEGIN) == {
        "visible_gpus": 0, "wall": 4.0, "waited": 4.0, "startup": None, "restarts": 0,
        "restart_seconds": 0.0, "ran": {},
    }  # fmt: skip


def test_workers_that_join_no_group_run_when_they_are_started(
    tmp_path: Path, clock: list[float]
) -> None:
    node = node_of(tmp_path)
    PhaseLog(tmp_path, 0).add(PhaseBegin(Phase.RUNNING, None, 0, 1, time=0, monotonic=1010.0))
    clock.append(1030.0)
    found = durations(node, BEGIN)
    assert (found["wall"], found["waited"], found["startup"]) == (30.0, 10.0, 10.0)
