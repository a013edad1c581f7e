"""Faults of the roll-call that differ from host to host, each caused for real: a clock, a version,
an address that swallows all.
"""

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
    gave_up_after,
    last_message,
    rank_variables,
    script,
    so_far,
    start,
)
from namespaces import Machine, machines, why_not

# The process of rank 1 is told to be off by a line of its own; the rest is what any script does.
INIT = """
    import os, time
    if os.environ["RANK"] == "1":
        exec(os.environ.get("FAULT", ""))
    from clusterjob import bootstrap
    with bootstrap.init(timeout=60) as ctx:
        print("met", ctx.rank, flush=True)
"""


@pytest.mark.parametrize(("ahead", "words"), [(3600, "ahead of"), (-3600, "behind")])
def test_a_clock_that_is_far_off_is_named_once_and_the_job_goes_on(
    tmp_path: Path, ahead: int, words: str
) -> None:
    """Rank 1 reads the clock of another host; two nodes need an address that is no loopback's."""
    why = why_not()
    if why:
        pytest.skip(why)
    path = script(tmp_path, INIT)
    with machines(1) as [machine]:
        # Two processes of a node, of which the one that is off is not the first.
        environs = [
            rank_variables(rank, 2, 29500) | {"MASTER_ADDR": machine.address} for rank in (0, 1)
        ]
        environs[1]["FAULT"] = f"real = time.time; time.time = lambda: real() + {ahead}"
        started = [
            start(machine.command(sys.executable, path), tmp_path, environ) for environ in environs
        ]
        ended = [finish(process) for process in started]
    assert [each.code for each in ended] == [0, 0], ended
    lines = [line for each in ended for line in each.err.splitlines() if "clock" in line]
    assert len(lines) == 1
    assert lines[0].startswith(
        f"clusterjob: the clock of {HOST} (pid {started[1].pid}), rank 1, is "
    )
    assert lines[0].endswith(f" s {words} rank 0's")


@pytest.mark.parametrize(("ahead", "words"), [(3600, "ahead of"), (-3600, "behind")])
def test_a_clock_that_is_far_off_is_named_while_somebody_is_missing(
    tmp_path: Path, ahead: int, words: str
) -> None:
    path, port = script(tmp_path, INIT.replace("timeout=60", "timeout=600")), free_port()
    fault = {"FAULT": f"real = time.time; time.time = lambda: real() + {ahead}"}
    first, second, _ = (rank_variables(rank, 3, port) for rank in range(3))  # the third never comes
    started = [start([sys.executable, path], tmp_path, first)]
    try:
        if ahead < 0:  # one that is behind is told from one that came early if it comes later
            assert next_line(started[0]).startswith("clusterjob: waiting for ranks 1 ")
        started.append(start([sys.executable, path], tmp_path, second | fault))
        line = next_line(started[1] if ahead < 0 else started[0])
        while "waiting" in line:  # rank 0 says that first
            line = next_line(started[0])
    finally:
        for process in started:
            process.kill()
            finish(process)
    assert line.startswith(
        f"clusterjob: the clock of {HOST} (pid {started[1].pid}), rank 1, is at least 3"
    )
    assert line.endswith(f" s {words} rank 0's")


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.readline().strip()


def test_another_version_of_torch_is_named_to_both_at_once(tmp_path: Path) -> None:
    begin = time.monotonic()
    path, port = script(tmp_path, INIT), free_port()
    fault = {"FAULT": "import torch; torch.__version__ = '1.0.0'"}
    started = [
        start([sys.executable, path], tmp_path, rank_variables(rank, 2, port) | fault)
        for rank in (0, 1)
    ]
    ended = [finish(process) for process in started]
    assert time.monotonic() - begin < 50  # 60 were allowed
    for each in ended:
        assert each.code == 1
        line = last_message(each.err)
        assert (
            f"rank 1 on {HOST} (pid {started[1].pid}) has torch 1.0.0, rank 0 on {HOST} (pid {started[0].pid}) has torch "
            in line
        )
        assert each.out == ""


@contextlib.contextmanager
def beside_a_swallower() -> Iterator[Machine]:
    """Make a machine on whose network 10.77.0.9 takes every packet and answers none."""
    why = why_not()
    if why:
        pytest.skip(why)
    with machines(1) as [machine]:
        swallow = [
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
            subprocess.run(machine.command(*swallow), capture_output=True, check=False).returncode
            == 0
        )
        yield machine


def test_an_address_that_swallows_all_is_named_while_it_is_waited_for(tmp_path: Path) -> None:
    with beside_a_swallower() as machine:
        environ = rank_variables(1, 2, 29500, 1) | {"MASTER_ADDR": "10.77.0.9"}
        path = script(tmp_path, INIT.replace("timeout=60", "timeout=7"))
        process = start(machine.command(sys.executable, path), tmp_path, environ)
        assert process.stderr is not None
        line = process.stderr.readline()
        ended = finish(process)
    assert line.startswith(f"clusterjob: rank 1 on {HOST} ")
    assert "cannot reach rank 0 at 10.77.0.9:29500: timed out; " in line
    assert so_far(line) <= 4 + MARGIN
    assert ended.code == 1
    assert "gave up after" in last_message(ended.err)


@pytest.mark.slow
def test_an_agent_names_an_address_that_swallows_all_while_it_tries(tmp_path: Path) -> None:
    with beside_a_swallower() as machine:
        environ = {
            "CLUSTERJOB_NNODES": "2",
            "CLUSTERJOB_NODE_RANK": "1",
            "CLUSTERJOB_MASTER_ADDR": "10.77.0.9",
            "CLUSTERJOB_TOKEN": "secret",
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
        if "node 1 cannot find node 0 at 10.77.0.9: no answer (port" in line
    ]
    assert 4 <= so_far(lines[0]) <= 4 + MARGIN, ended.err
    assert "gave up after" in lines[-1]


@pytest.mark.slow
def test_a_rank_that_has_died_is_named_to_those_who_wait(tmp_path: Path) -> None:
    path, port = script(tmp_path, INIT.replace("timeout=60", "timeout=7")), free_port()
    fault = {"FAULT": "os._exit(9)"}
    first, second = (
        start([sys.executable, path], tmp_path, rank_variables(rank, 2, port) | fault)
        for rank in (0, 1)
    )
    ended = [finish(first), finish(second)]
    assert [each.code for each in ended] == [1, 9]
    said = [
        line
        for line in ended[0].err.splitlines()
        if line.startswith(f"clusterjob: waiting for rank 1 (node 0, {HOST}): not heard of")
    ]
    assert len(said) == 1  # not again within 30 s
    assert 7 <= gave_up_after(last_message(ended[0].err)) <= 7 + MARGIN
