"""The network splits a job: the larger part goes on, and the other nodes come back to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import namespaces
import pytest
from namespaces import Machine
from procs import PLAIN, TEST_TIMEOUT, Job, MakeJob, below, kill_all, wait_until

from clusterjob.node.logs.events import read_job_events

WORKER = """
    import os, pathlib, time
    number = os.environ["TORCHELASTIC_RESTART_COUNT"]
    pathlib.Path(f"{number}.{os.environ['RANK']}").touch()
    while not pathlib.Path("enough").exists():
        time.sleep(0.05)
"""

pytestmark = pytest.mark.skipif(
    bool(namespaces.skip_reason()), reason=namespaces.skip_reason() or "-"
)


@pytest.fixture
def hosts() -> Iterator[list[Machine]]:
    with namespaces.machines(3) as made:
        yield made


def start(job: Job, hosts: list[Machine], *options: str) -> None:
    """Start a job, by default on two hosts and a spare one; each has its own job directory."""
    for node in range(len(hosts)):
        start_node(job, hosts, node, *(options or ("--spares", "1")))
    job.wait_for("0.0", "0.1")
    # The other nodes know by then which of them may coordinate the job.
    wait_until(lambda: events(job, 0, "running"), TEST_TIMEOUT)


def start_node(job: Job, hosts: list[Machine], node: int, *options: str) -> None:
    job.start(
        node,
        *(*options, "--max-restarts", "3", "--lease", "3", job.script(WORKER)),
        python=tuple(hosts[node].command(*PLAIN)),
        env={
            "CLUSTERJOB_MASTER_ADDR": hosts[0].address,
            "CLUSTERJOB_JOB_DIR": str(job.directory / f"host{node}"),
        },
    )


def link(host: Machine, state: str) -> None:
    """Set the interface of a host up or down."""
    subprocess.run(host.command("ip", "link", "set", "eth0", state), check=True)


def events(job: Job, node: int, name: str) -> list[dict[str, Any]]:
    """Return the events of a coordinator on a host."""
    directory = job.directory / f"host{node}"
    return [event for event in read_job_events(directory) if event["event"] == name]


def result(job: Job, node: int) -> dict[str, Any]:
    path: Path = job.directory / f"host{node}" / "result.json"
    return json.loads(path.read_text())


@pytest.mark.slow
def test_job_goes_on_without_node_0_which_returns_as_spare(
    make_job: MakeJob, hosts: list[Machine]
) -> None:
    job = make_job(3)
    start(job, hosts)
    link(hosts[0], "down")
    job.wait_for("1.0", "1.1", timeout=TEST_TIMEOUT)
    link(hosts[0], "up")
    wait_until(lambda: 0 in [each["node_rank"] for each in events(job, 1, "joined")], TEST_TIMEOUT)
    job.path("enough").touch()
    assert job.wait() == [0, 0, 0]
    assert [event["nodes"] for event in events(job, 1, "started")] == [[2, 1]]
    assert (result(job, 1)["state"], result(job, 1)["restarts"]) == ("SUCCEEDED", 1)
    assert [each["kind"] for each in result(job, 1)["attempts"]] == ["node_lost", ""]
    assert not (job.directory / "host0" / "result.json").exists()


@pytest.mark.slow
def test_coordinator_that_gave_up_and_goes_on_blames_the_node_that_was_lost(
    make_job: MakeJob, hosts: list[Machine]
) -> None:
    job = make_job(3)
    start(job, hosts)
    spare = [job.agents[2].pid, *below(job.agents[2].pid)]
    for pid in spare:
        os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: events(job, 0, "lost"), TEST_TIMEOUT)
    kill_all([job.agents[1].pid, *below(job.agents[1].pid)])
    wait_until(lambda: len(events(job, 0, "listening")) == 2, TEST_TIMEOUT)
    for pid in spare:
        os.kill(pid, signal.SIGCONT)
    job.wait_for("1.0", "1.1", timeout=TEST_TIMEOUT)
    job.path("enough").touch()
    assert job.wait() == [0, -signal.SIGKILL, 0]
    ended, _ = events(job, 0, "round_ended")
    assert (ended["kind"], ended["node"]) == ("node_lost", 1)


def test_node_0_that_is_started_again_finds_the_coordinator_that_has_moved(
    make_job: MakeJob, hosts: list[Machine]
) -> None:
    job = make_job(3)
    start(job, hosts)
    kill_all([job.agents[0].pid, *below(job.agents[0].pid)])
    job.wait_for("1.0", "1.1")
    start_node(job, hosts, 0, "--spares", "1")
    wait_until(lambda: 0 in [each["node_rank"] for each in events(job, 1, "joined")], TEST_TIMEOUT)
    job.path("enough").touch()
    assert job.wait() == [-signal.SIGKILL, 0, 0, 0]
    assert [event["nodes"] for event in events(job, 1, "started")] == [[2, 1]]


def test_of_two_halves_only_that_of_the_coordinator_goes_on(make_job: MakeJob) -> None:
    """The connections are closed on both sides, which shows nobody that the other has ended.

    The agent of the coordinator is killed, too: it comes back and goes on.
    """
    with namespaces.machines(2) as hosts:
        job = make_job(2)
        start(job, hosts, "--min-nodes", "1")
        agent = job.agent_of(0)
        for host in hosts:
            link(host, "down")
            subprocess.run(host.command("ss", "-K", "-t"), check=True, capture_output=True)
        os.kill(agent, signal.SIGKILL)
        job.wait_for("1.0")
        lost = "node 1 lost the coordinator"
        wait_until(lambda: lost in job.stderr(job.agents[1]), TEST_TIMEOUT)
        time.sleep(6)  # node 1 would have taken the coordinator's place
        assert events(job, 1, "started") == []
        for host in hosts:
            link(host, "up")
        wait_until(lambda: len(events(job, 0, "joined")) >= 4, TEST_TIMEOUT)
        job.path("enough").touch()
        assert job.wait() == [0, 0]
    assert [event["nodes"] for event in events(job, 0, "started")] == [[0, 1], [0]]
    assert result(job, 0)["restarts"] == 1
