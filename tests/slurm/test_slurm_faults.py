"""Faults under a real Slurm: killed daemons, scancel, time limits and deleted directories."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time

import pytest
from procs import (
    below,
    command_line,
    environ,
    own_processes,
    wait_for_no_processes,
    wait_until,
)
from slurm_user import GUEST, PROMPT, SLEEPER, User

pytestmark = pytest.mark.slow


def runs_on(pid: int, node: str) -> bool:
    """Return whether a process belongs to the job's step 0 on a node."""
    found = environ(pid)
    return (found.get("SLURMD_NODENAME"), found.get("SLURM_STEP_ID")) == (node, "0")


def stepd_of(user: User, node: str) -> int:
    """Return the slurmstepd of the job's step 0 on a node."""
    stepds = user.slurm.stepd_pids()
    return next(pid for pid in stepds if any(runs_on(child, node) for child in below(pid)))


def on_node(node: str) -> list[int]:
    """Return the processes of the test's jobs on a node, without Slurm's own."""
    pids = [pid for pid in own_processes() if runs_on(pid, node)]
    return [pid for pid in pids if "slurmstepd" not in command_line(pid)]


@pytest.mark.parametrize("option", ["--launcher=agent", "--launcher=srun", "--max-restarts=3"])
def test_workers_of_killed_slurmstepd_end(user: User, option: str) -> None:
    """Slurm does not notice the kill by itself.

    Without the agents' own check the job would be RUNNING until its time limit, and its ranks would
    survive a scancel.
    """
    has_agent = option != "--launcher=srun"
    text = SLEEPER if has_agent else SLEEPER.replace("RANK", "SLURM_PROCID")
    job_id = user.submit(text, "--nodes", "2", option, until=("up0", "up1"))
    os.kill(stepd_of(user, "n2"), signal.SIGKILL)
    wait_until(lambda: not on_node("n2"), PROMPT, "the end of the workers on n2")
    if has_agent:
        message = user("wait", job_id, code=1).stderr
        assert (
            "node 1 (host n2): slurmstepd, the parent of this node's agent, was killed" in message
        )
        wait_until(lambda: not on_node("n1"), PROMPT, "the end of the workers on n1")
        return
    user("cancel", job_id)
    wait_until(lambda: not on_node("n1"), PROMPT, "the end of the workers on n1")
    assert user("wait", job_id, code=143).returncode == 143


def test_follow_continues_while_controller_is_down(user: User) -> None:
    """The job directory has the output and the verdict."""
    job_id = user.submit(GUEST, "--nodes", "2", until=("up0", "up1"))
    follower = user.start("logs", "-f", job_id)
    wait_until(lambda: "line of 1" in user.output_of(follower)[0], PROMPT)
    user.slurm.stop_controller()
    time.sleep(6)  # long enough for a query without an answer
    user.path("leave").touch()
    assert follower.wait(PROMPT) == 0
    out, err = user.output_of(follower)
    assert "left 1" in out
    assert "Traceback" not in err
    user.slurm.start_controller()


@pytest.mark.parametrize(
    "waiting", ["sleep 1000", "sleep 1000 & wait", "[ $SLURM_NODEID = 0 ] || sleep 1000"]
)
def test_scancel_during_setup_lines_cancels_job(user: User, waiting: str) -> None:
    """Slurm ends the shells; their report of an early end is not a failed setup line."""
    job_id = user.submit(
        SLEEPER,
        "--nodes",
        "2",
        "--setup",
        f"touch setup$SLURM_NODEID; {waiting}",
        until=("setup0", "setup1"),
    )
    if waiting.startswith("["):  # the agent of node 0 runs and reads what node 1 writes
        wait_until((user.directory_of(job_id) / "events.jsonl").exists, PROMPT)
    user.slurm.run("scancel", user.slurm_id(job_id))
    assert user("wait", job_id, code=143).stderr.startswith(f"clusterjob: job {job_id} CANCELLED")
    wait_for_no_processes(PROMPT)


def test_running_job_with_deleted_directory_ends_as_lost_or_cancelled(user: User) -> None:
    job_id = user.submit(SLEEPER, "--nodes", "2", until=("up0", "up1"))
    follower = user.start("wait", job_id)
    # Rename first, as the agents keep writing to the directory.
    shutil.rmtree(user.directory_of(job_id).rename(user.path("deleted")))
    assert user.job(job_id)["state"] in ("RUNNING", "PENDING")
    assert user.output(job_id) == ""
    user.slurm.run("scancel", user.slurm_id(job_id))
    ended = user.wait_for_state(job_id, "LOST", "CANCELLED", timeout=PROMPT * 2)
    assert ended["exit_code"] in (1, 143)
    assert follower.wait(PROMPT * 4) in (1, 143)
    assert "Traceback" not in user.output_of(follower)[1]
    wait_for_no_processes(PROMPT)


def test_job_that_reaches_time_limit_fails_with_exit_code_124(user: User) -> None:
    """Slurm counts in minutes. The signal to the workers is not reported as their failure."""
    job_id = user.submit(SLEEPER, "--nodes", "2", "--time", "1m", "--set", "comment=mine")
    raw = user.submit("import time; time.sleep(1000)", "--time", "1m", "--launcher", "srun")
    for one in (job_id, raw):
        message = user("wait", one, code=124, timeout=180).stderr
        assert re.match(
            rf"clusterjob: job {one} FAILED: the time limit (of 60 s )?was reached", message
        ), message
    wait_for_no_processes(PROMPT * 3)


@pytest.mark.parametrize("target", ["{}.0", "--full {}"])
@pytest.mark.parametrize("option", ["--max-restarts=0", "--max-restarts=3", "--launcher=srun"])
def test_scancel_by_sigkill_leaves_no_process(user: User, option: str, target: str) -> None:
    """The cluster has proctrack/linuxproc and no cgroup; workers and children have own sessions."""
    text = f"""
        import os, subprocess
        os.environ.setdefault("RANK", os.environ["SLURM_PROCID"])
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        {SLEEPER.replace(chr(10), chr(10) + "    ")}
    """
    job_id = user.submit(
        text, "--nodes", "2", "--nproc-per-node", "2", option, until=("up0", "up1", "up2", "up3")
    )
    user.slurm.run("scancel", "--signal=KILL", *target.format(user.slurm_id(job_id)).split())
    wait_for_no_processes(PROMPT)
