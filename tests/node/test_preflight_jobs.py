"""Whole jobs with --preflight: real agents, forkservers and measuring processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from namespaces import machines, skip_reason
from procs import (
    TEST_TIMEOUT,
    WITH_TORCH,
    Job,
    MakeJob,
    children,
    command_line,
    missing_programs,
    wait_until,
)

from clusterjob.insight.preflight import read_preflight
from clusterjob.insight.report import preflight_table


def preflight_event(job: Job) -> dict[str, Any]:
    [event] = job.events("preflight")
    return event


def wait_for_measuring(job: Job) -> list[int]:
    """Return the measuring process of each node."""

    def measuring(agent: int) -> list[int]:
        return [pid for pid in children(agent) if "node.preflight" in command_line(pid)]

    return [
        wait_until(lambda pid=agent.pid: measuring(pid), TEST_TIMEOUT, "a measuring process")[0]
        for agent in job.agents
    ]


@pytest.mark.parametrize("mode", ["--preflight", "--preflight=warn"])
def test_preflight_without_torch_is_refused_or_named(make_job: MakeJob, mode: str) -> None:
    job = make_job(2)
    (job.directory / "torch.py").write_text("raise ImportError('no torch')")
    path = f"{job.directory}:{os.environ['PYTHONPATH']}"
    job.start_all(mode, job.script('print("up")'), env={"PYTHONPATH": path})
    assert job.wait() == ([0, 0] if mode == "--preflight=warn" else [1, 1])
    assert "torch cannot be imported" in preflight_event(job)["slow"][0]
    assert bool(job.events("started")) is (mode == "--preflight=warn")


def test_preflight_measures_hosts_and_starts_the_job(make_job: MakeJob) -> None:
    job = make_job(2)
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
    job.start_all("--preflight=warn", script, python=WITH_TORCH)
    assert job.wait(4 * TEST_TIMEOUT) == [0, 0]
    assert job.log(0, "rank0.out") == "3\n", "the worker, the store, the process that writes output"
    assert not [name for name in set(os.listdir(job.dir)) - before if name.startswith("tmp")]
    event = preflight_event(job)
    assert event["seconds"] <= 20.5
    names = [column[0] for column in event["table"]["columns"]]
    assert names == ["matrix multiply", "all-reduce"]
    assert all(column[2] > 0 for column in event["table"]["columns"])
    assert len(event["table"]["rows"]) == 2
    text = job.stderr(job.agents[0])
    assert "preflight: 2 nodes in" in text
    assert "matrix multiply" in text
    found = read_preflight(job.dir)
    assert found is not None
    shown = preflight_table.rows(found)
    assert len(shown["rows"]) == 2


def test_cancel_ends_the_preflight(make_job: MakeJob) -> None:
    job = make_job(2)
    job.start_all("--preflight", job.script('print("up")'), python=WITH_TORCH)
    pids = wait_for_measuring(job)
    job.agents[0].send_signal(signal.SIGTERM)
    job.wait()
    assert job.result["state"] == "CANCELLED"
    assert not job.events("started")
    assert not [pid for pid in pids if command_line(pid)]


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


@pytest.mark.slow
@pytest.mark.root
def test_one_slow_host_of_five_is_named_and_no_other(make_job: MakeJob) -> None:
    if why := skip_reason() or missing_programs("tc"):
        pytest.skip(why)
    job = make_job(5)
    with machines(5) as hosts:
        for node, machine in enumerate(hosts):
            if node == 3:  # 25 MB/s out; its answers are late, so it also receives slowly
                limit = "tbf rate 200mbit burst 128kb latency 200ms"
                words = machine.command("tc", "qdisc", "add", "dev", "eth0", "root", *limit.split())
                subprocess.run(words, check=True)
            enter = ["sh", "-ec", 'hostname "$1"; shift; exec "$@"', "sh", f"gpu{node}"]
            job.start(
                node, "--preflight=warn", "--", "true",
                python=tuple(machine.command("unshare", "--uts", *enter, sys.executable)),
                env={"CLUSTERJOB_MASTER_ADDR": hosts[0].address},
            )  # fmt: skip
        assert job.wait(5 * TEST_TIMEOUT) == [0] * 5, job.result
    event = preflight_event(job)
    named = [text.split(":")[0] for text in event["slow"]]
    assert named == ["host gpu3"], event
    assert event["seconds"] <= 20.5
