"""Real faults in a rank rendezvous: other torch version, lost packets, a dead rank."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import (
    HOST,
    MARGIN,
    finish,
    free_port,
    last_message,
    rank_variables,
    script,
    start,
    timeout_seconds,
    waited_seconds,
)
from namespaces import Machine, machines, skip_reason
from preloaded import Preloaded

# Rank 1 executes the code in FAULT first; the rest is a usual script.
INIT = """
    import os, time
    if os.environ["RANK"] == "1":
        exec(os.environ.get("FAULT", ""))
    from clusterjob import bootstrap
    with bootstrap.init(timeout=60) as ctx:
        print("met", ctx.rank, flush=True)
"""


def test_different_torch_versions_are_refused_on_both_ranks(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    begin = time.monotonic()
    path, port = script(tmp_path, INIT), free_port()
    fault = {"FAULT": "import torch; torch.__version__ = '1.0.0'"}
    started = [
        preloaded.start([path], tmp_path, rank_variables(rank, 2, port) | fault) for rank in (0, 1)
    ]
    ended = [finish(process) for process in started]
    assert time.monotonic() - begin < 50  # the timeout of the script is 60 s
    for each in ended:
        assert each.code == 1
        line = last_message(each.err)
        assert (
            f"rank 1 on {HOST} (pid {started[1].pid}) has torch 1.0.0, "
            f"rank 0 on {HOST} (pid {started[0].pid}) has torch " in line
        )
        assert each.out == ""


@contextlib.contextmanager
def machine_with_packet_loss() -> Iterator[Machine]:
    """Create a machine whose packets to 10.77.0.9 are lost."""
    why = skip_reason()
    if why:
        pytest.skip(why)
    with machines(1) as [machine]:
        drop_packets = [
            "ip",
            "neigh",
            "add",
            "10.77.0.9",
            "lladdr",
            "02:00:00:00:00:09",
            "dev",
            "eth0",
            "nud",
            "permanent",
        ]
        assert (
            subprocess.run(
                machine.command(*drop_packets), capture_output=True, check=False
            ).returncode
            == 0
        )
        yield machine


@pytest.mark.slow
def test_waiting_rank_reports_master_addr_without_answer(tmp_path: Path) -> None:
    with machine_with_packet_loss() as machine:
        environ = rank_variables(1, 2, 29500, 1) | {"MASTER_ADDR": "10.77.0.9"}
        path = script(tmp_path, INIT.replace("timeout=60", "timeout=7"))
        process = start(machine.command(sys.executable, path), tmp_path, environ)
        assert process.stderr is not None
        line = process.stderr.readline()
        ended = finish(process)
    assert line.startswith(f"clusterjob: rank 1 on {HOST} ")
    assert "cannot reach rank 0 at 10.77.0.9:29500: timed out; " in line
    assert waited_seconds(line) <= 4 + MARGIN
    assert ended.code == 1
    assert "gave up after" in last_message(ended.err)


@pytest.mark.slow
def test_joining_agent_reports_master_addr_without_answer(tmp_path: Path) -> None:
    with machine_with_packet_loss() as machine:
        environ = {
            "CLUSTERJOB_NNODES": "2",
            "CLUSTERJOB_NODE_RANK": "1",
            "CLUSTERJOB_MASTER_ADDR": "10.77.0.9",
            "CLUSTERJOB_TOKEN": "secret-of-the-job",
        }
        argv = [
            sys.executable,
            "-m",
            "clusterjob",
            "launch",
            "--join-timeout",
            "6",
            "--nproc-per-node",
            "1",
            script(tmp_path, INIT),
        ]
        ended = finish(start(machine.command(*argv), tmp_path, environ))
    assert ended.code == 1
    lines = [
        line
        for line in ended.err.splitlines()
        if "node 1 cannot reach node 0 at 10.77.0.9: no answer (port" in line
    ]
    assert 4 <= waited_seconds(lines[0]) <= 4 + MARGIN, ended.err
    assert "gave up after" in lines[-1]


@pytest.mark.slow
def test_waiting_rank_reports_dead_rank_once(tmp_path: Path, preloaded: Preloaded) -> None:
    path, port = script(tmp_path, INIT.replace("timeout=60", "timeout=7")), free_port()
    fault = {"FAULT": "os._exit(9)"}
    first, second = (
        preloaded.start([path], tmp_path, rank_variables(rank, 2, port) | fault) for rank in (0, 1)
    )
    ended = [finish(first), finish(second)]
    assert [each.code for each in ended] == [1, 9]
    notices = [
        line
        for line in ended[0].err.splitlines()
        if line.startswith(f"clusterjob: waiting for rank 1 (node 0, {HOST}): not seen yet")
    ]
    assert len(notices) == 1  # no second notice within 30 s
    assert 7 <= timeout_seconds(last_message(ended[0].err)) <= 7 + MARGIN
