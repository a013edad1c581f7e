"""Whole jobs with --preflight: real agents, forkservers and measuring processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import slow_hosts
from namespaces import machines
from procs import TEST_TIMEOUT, WITH_TORCH, Job, wait_until

from clusterjob.insight.preflight import read_preflight
from clusterjob.insight.report import preflight_table
from clusterjob.node.logs.job_dir import PREFLIGHT_LOG

MakeJob = Callable[..., Job]


def preflight_event(job: Job) -> dict[str, Any]:
    [event] = job.events("preflight")
    return event


def wait_for_measuring(job: Job) -> list[int]:
    """Return the measuring process of each node; they start where the workers start later."""
    found = []
    for node, agent in enumerate(job.agents):
        # It makes its log. The import of torch starts other processes before.
        log = job.dir / "logs" / f"node{node}" / PREFLIGHT_LOG
        wait_until(log.exists, TEST_TIMEOUT, "a measuring process")
        found.append(job.workers_of(agent)[0])
    return found


@pytest.mark.parametrize("mode", ["--preflight", "--preflight=warn"])
def test_preflight_without_torch_is_refused_or_named(make_job: MakeJob, mode: str) -> None:
    job = make_job(2)
    job.start_all(mode, job.script('print("up")'))
    assert job.wait() == ([0, 0] if mode == "--preflight=warn" else [1, 1])
    assert "torch cannot be imported" in preflight_event(job)["slow"][0]
    assert bool(job.events("started")) is (mode == "--preflight=warn")


def test_preflight_measures_hosts_and_starts_the_job(make_job: MakeJob) -> None:
    job = make_job(2)
    job.start_all("--preflight=warn", job.script('print("up")'), python=WITH_TORCH)
    assert job.wait(4 * TEST_TIMEOUT) == [0, 0]
    event = preflight_event(job)
    assert event["seconds"] <= 20.5
    names = [column[0] for column in event["table"]["columns"]]
    assert names == [
        "matrix multiply", "memory", "all-reduce", "ring all-reduce", "disk write", "disk read",
    ]  # fmt: skip
    assert all(column[2] > 0 for column in event["table"]["columns"])
    assert len(event["table"]["rows"]) == 2
    text = job.stderr(job.agents[0])
    assert "preflight: 2 nodes in" in text
    assert "matrix multiply" in text
    found = read_preflight(job.dir)
    assert found is not None
    shown = preflight_table.rows(found)
    assert shown is not None
    assert len(shown["rows"]) == 2


def test_killed_measuring_process_is_named_and_the_job_is_refused(make_job: MakeJob) -> None:
    job = make_job(2)
    job.start_all("--preflight", job.script('print("up")'), python=WITH_TORCH)
    os.kill(wait_for_measuring(job)[1], signal.SIGKILL)
    assert job.wait() == [1, 1]
    result = job.result
    assert (result["state"], result["failure"]["kind"]) == ("FAILED", "launch")
    assert result["failure"]["node_rank"] == 1
    assert "the measuring process: it has ended" in result["reason"]
    assert not job.events("started")


def test_measuring_processes_end_before_the_workers_and_leave_no_file(make_job: MakeJob) -> None:
    job = make_job(1)
    before = set(os.listdir(job.dir))
    script = job.script(
        """
        import os, pathlib, time
        time.sleep(1)
        parent = os.getppid()
        children = pathlib.Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        print(len(children))
        """
    )
    job.start_all("--preflight", script, python=WITH_TORCH)
    assert job.wait(2 * TEST_TIMEOUT) == [0]
    assert job.log(0, "rank0.out") == "3\n", "the worker, the store, the process that writes output"
    assert not [name for name in set(os.listdir(job.dir)) - before if name.startswith("tmp")]


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("way", slow_hosts.WAYS)
def test_one_slow_host_of_five_is_named_and_no_other(way: str, tmp_path: Path) -> None:
    if why := slow_hosts.skip_reason():
        pytest.skip(why)
    with machines(slow_hosts.HOSTS) as hosts:
        for number in range(3):
            directory = tmp_path / str(number)
            directory.mkdir()
            event = slow_hosts.run(hosts, directory, way)
            named = [text.split(":")[0] for text in event["slow"]]
            assert named == ([] if way == "clean" else [f"host gpu{slow_hosts.SLOW}"]), event
            assert event["seconds"] <= 20.5
