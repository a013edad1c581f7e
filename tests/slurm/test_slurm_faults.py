"""Faults under a real Slurm: daemons that go while a job runs, ends that Slurm or a person brings
about, directories that vanish.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time

import pytest
from procs import PATIENCE, below, command_line, nothing_left, own_marked, wait_until
from slurm_user import GUEST, PROMPT, SLEEPER, User

pytestmark = pytest.mark.slow


def stepd_of(user: User, node: str) -> int:
    """Return the slurmstepd that keeps a node's part of the job's step 0."""
    for pid in user.slurm.stepd_pids():
        children = below(pid)
        if any(
            f"SLURMD_NODENAME={node}".encode() in environ(child)
            and b"SLURM_STEP_ID=0" in environ(child)
            for child in children
        ):
            return pid
    raise AssertionError(
        f"no step on {node}: {[command_line(pid) for pid in user.slurm.stepd_pids()]}"
    )


def environ(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            return stream.read().split(b"\0")
    except OSError:
        return []


def on_node(node: str) -> list[int]:
    """Return the processes of the test's jobs on a node, but for Slurm's own."""
    wanted = {f"SLURMD_NODENAME={node}".encode(), b"SLURM_STEP_ID=0"}
    return [
        pid
        for pid in own_marked()
        if wanted <= set(environ(pid)) and "slurmstepd" not in command_line(pid)
    ]


@pytest.mark.parametrize("launcher", ["agent", "srun"])
def test_what_a_killed_slurmstepd_kept_dies_with_it(user: User, launcher: str) -> None:
    """Slurm does not notice by itself: the job would be RUNNING until its time limit, and its ranks
    go on after a scancel.
    """
    text = SLEEPER if launcher == "agent" else SLEEPER.replace("RANK", "SLURM_PROCID")
    job_id = user.submit(text, "--nodes", "2", "--launcher", launcher)
    user.wait_for("up0", "up1")
    os.kill(stepd_of(user, "n2"), signal.SIGKILL)
    wait_until(lambda: not on_node("n2"), PROMPT, "the end of the workers on n2")
    if launcher == "agent":
        said = user("wait", job_id, code=1).stderr
        assert (
            "node 1 (host n2): Slurm's own process that kept this node's part of the job is gone"
            in said
        )
        wait_until(lambda: not on_node("n1"), PROMPT, "the end of the workers on n1")
        return
    user("cancel", job_id)
    wait_until(lambda: not on_node("n1"), PROMPT, "the end of the workers on n1")
    assert user("wait", job_id, code=143).returncode == 143


def test_a_job_is_followed_over_a_restart_of_the_controller(user: User) -> None:
    job_id = user.submit(GUEST, "--nodes", "2")
    user.wait_for("up0", "up1")
    follower = user.start("logs", "-f", job_id)
    wait_until(lambda: "line of 1" in user.said(follower)[0], PROMPT)
    user.slurm.restart_controller()
    user.path("leave").touch()
    assert follower.wait(PATIENCE) == 0
    assert "left 1" in user.said(follower)[0]
    assert user.slurm.wait_for_job(user.slurm_id(job_id))["JobState"] == "COMPLETED"


def test_a_job_is_followed_while_the_controller_is_down(user: User) -> None:
    """Its output and its end are in its directory."""
    job_id = user.submit(GUEST, "--nodes", "2")
    user.wait_for("up0", "up1")
    follower = user.start("logs", "-f", job_id)
    wait_until(lambda: "line of 1" in user.said(follower)[0], PROMPT)
    user.slurm.stop_controller()
    time.sleep(6)  # it asks, and is not answered
    user.path("leave").touch()
    assert follower.wait(PROMPT) == 0
    out, err = user.said(follower)
    assert "left 1" in out
    assert "Traceback" not in err
    user.slurm.start_controller()


@pytest.mark.parametrize("delay", [0.0, 0.4, 0.7, 1.0])
def test_a_scancel_during_the_start(user: User, delay: float) -> None:
    job_id = user.submit(SLEEPER, "--nodes", "2")
    time.sleep(delay)
    user.slurm.run("scancel", user.slurm_id(job_id))
    assert user("wait", job_id, code=143).stderr.startswith(f"clusterjob: job {job_id} CANCELLED")
    nothing_left(PROMPT)


@pytest.mark.parametrize(
    "waiting", ["sleep 1000", "sleep 1000 & wait", "[ $SLURM_NODEID = 0 ] || sleep 1000"]
)
def test_a_scancel_during_setup_lines(user: User, waiting: str) -> None:
    """Shells that Slurm ends may still say that they ended early: that is the cancel's doing, and
    no refusal.
    """
    job_id = user.submit(SLEEPER, "--nodes", "2", "--setup", f"touch setup$SLURM_NODEID; {waiting}")
    user.wait_for("setup0", "setup1")
    if waiting.startswith("["):  # the agent of node 0 is there, and sees what node 1 writes
        wait_until((user.directory_of(job_id) / "events.jsonl").exists, PROMPT)
    user.slurm.run("scancel", user.slurm_id(job_id))
    assert user("wait", job_id, code=143).stderr.startswith(f"clusterjob: job {job_id} CANCELLED")
    nothing_left(PROMPT)


@pytest.mark.parametrize("delay", [0.0, 0.5, 0.8])
def test_a_cancel_during_the_start(user: User, delay: float) -> None:
    job_id = user.submit(SLEEPER, "--nodes", "2")
    time.sleep(delay)
    user("cancel", job_id)
    assert user("wait", job_id, code=143).stderr.startswith(f"clusterjob: job {job_id} CANCELLED")
    nothing_left(PROMPT)


def test_a_job_that_never_starts_says_why_and_can_be_cancelled(user: User) -> None:
    user.slurm.submit("--nodes=4", "--exclusive", "--output=/dev/null", script="sleep 600")
    command = user.start("run", "--cluster", "slurm", "--nodes", "4", user.script(SLEEPER))
    wait_until(
        lambda: any(why in user.said(command)[1] for why in ("Resources", "Priority")),
        PROMPT * 2,
        "Slurm's reason",
    )
    command.send_signal(signal.SIGINT)
    assert command.wait(PROMPT * 2) == 130
    [job] = user.jobs()
    assert (job["state"], job["started_at"]) == ("CANCELLED", None)


def test_the_job_directory_is_deleted_while_the_job_runs(user: User) -> None:
    job_id = user.submit(SLEEPER, "--nodes", "2")
    user.wait_for("up0", "up1")
    follower = user.start("wait", job_id)
    shutil.rmtree(
        user.directory_of(job_id).rename(user.path("deleted"))
    )  # at once: the agents write there all the while
    assert user.job(job_id)["state"] in ("RUNNING", "PENDING")
    assert user.output(job_id) == ""
    user.slurm.run("scancel", user.slurm_id(job_id))
    ended = user.wait_for_state(job_id, "LOST", "CANCELLED", timeout=PROMPT * 2)
    assert ended["exit_code"] in (1, 143)
    assert follower.wait(PROMPT * 4) in (1, 143)
    assert "Traceback" not in user.said(follower)[1]
    nothing_left(PROMPT)


def test_the_time_limit(user: User) -> None:
    """Slurm counts in minutes. The workers are told to end, which is no failure of theirs."""
    job_id = user.submit(SLEEPER, "--nodes", "2", "--time", "1m", "--set", "comment=mine")
    raw = user.submit("import time; time.sleep(1000)", "--time", "1m", "--launcher", "srun")
    for one in (job_id, raw):
        said = user("wait", one, code=124, timeout=180).stderr
        assert re.match(
            rf"clusterjob: job {one} FAILED: the time limit (of 60 s )?was reached", said
        ), said
    nothing_left(PROMPT * 3)


def test_a_node_s_slurmd_is_killed(user: User) -> None:
    """The job goes on until Slurm gives the node up, and then ends with that said; nothing hangs."""
    job_id = user.submit(SLEEPER, "--nodes", "2", "--nodelist", "n2,n3")
    user.wait_for("up0", "up1")
    user.slurm.kill_node(3)
    assert user.job(job_id)["state"] == "RUNNING"  # for the 15 s of SlurmdTimeout
    said = user("wait", job_id, code=1, timeout=180).stderr
    assert "NODE_FAIL" in said or "host n3" in said
