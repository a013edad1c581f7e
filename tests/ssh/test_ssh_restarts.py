"""Jobs on SSH hosts go on after the kill of an agent or a forkserver."""

from __future__ import annotations

import json
import os
import signal

import pytest
from procs import children, wait_until
from sshsite import Site, output_lines, wait_for_lines
from verdicts import wait_for_verdict

from clusterjob.node.verdict import JobState

pytestmark = pytest.mark.slow

ROUNDS = """
    import os, time
    rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    print("up", rank, restart, flush=True)
    while restart != "3":
        time.sleep(0.05)
    print("left", rank)
"""


def test_job_goes_on_after_kill_of_agents_and_forkserver(site: Site) -> None:
    record = site.submit(ROUNDS, max_restarts=3)
    for restart, (node, part) in enumerate([(1, "agent"), (0, "agent"), (1, "forkserver")]):
        wait_for_lines(record, f"up 0 {restart}", f"up 1 {restart}")
        directory = site.remote_dir(record, f"gpu{node + 1}")
        parent = json.loads((directory / "agents" / f"node{node}.json").read_text())["pid"]
        (agent,) = children(parent)
        (forkserver,) = children(agent)
        os.kill(agent if part == "agent" else forkserver, signal.SIGKILL)
    verdict = wait_for_verdict(record)
    assert (verdict.state, verdict.restarts) == (JobState.SUCCEEDED, 3)
    lines = output_lines(record)
    for rank in (0, 1):
        expected = [*(f"{rank} out up {rank} {n}" for n in range(4)), f"{rank} out left {rank}"]
        assert [line for line in lines if line.startswith(f"{rank} ")] == expected
    wait_until(lambda: not site.running(), 10, "the end")
