"""Slurm jobs go on after the kill of an agent or a forkserver."""

from __future__ import annotations

import os
import signal

import pytest
from procs import children, command_line
from slurm_user import User

pytestmark = pytest.mark.slow

ROUNDS = """
    import os, pathlib, time
    rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    pathlib.Path(f"up{rank}.{restart}").touch()
    while restart != "3":
        time.sleep(0.05)
    print("left", rank)
"""


def parent_on(user: User, node: str) -> int:
    """Return the parent of the job's agent on a node: the only child of Slurm's slurmstepd."""
    for stepd in user.slurm.stepd_pids():
        for pid in children(stepd):
            with open(f"/proc/{pid}/environ", "rb") as stream:
                environ = stream.read().split(b"\0")
            if {f"SLURMD_NODENAME={node}".encode(), b"SLURM_STEP_ID=0"} <= set(environ):
                return pid
    raise AssertionError(f"no step on {node}: {[*map(command_line, user.slurm.stepd_pids())]}")


def test_job_goes_on_after_kill_of_agents_and_forkserver(user: User) -> None:
    job_id = user.submit(ROUNDS, "--nodes", "2", "--max-restarts", "3")
    for restart, (node, part) in enumerate(
        [("n2", "agent"), ("n1", "agent"), ("n2", "forkserver")]
    ):
        user.wait_for(f"up0.{restart}", f"up1.{restart}")
        (agent,) = children(parent_on(user, node))
        (forkserver,) = children(agent)
        os.kill(agent if part == "agent" else forkserver, signal.SIGKILL)
    user("wait", job_id)
    job = user.job(job_id)
    assert (job["state"], job["restarts"]) == ("SUCCEEDED", 3)
    assert user.slurm.wait_for_job(user.slurm_id(job_id))["JobState"] == "COMPLETED"
