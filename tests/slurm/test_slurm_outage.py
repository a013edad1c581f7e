"""Outages of the controller and killed processes of Slurm.

Running jobs continue, cancelled jobs end, and the true end is reported.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from procs import (
    TEST_TIMEOUT,
    below,
    command_line,
    environ,
    wait_for_no_processes,
    wait_until,
)
from slurm_user import GUEST, PROMPT, SLEEPER, User

from clusterjob.backends.slurm import job_end
from clusterjob.backends.slurm.accounting import Accounting
from clusterjob.backends.slurm.client import Client
from clusterjob.backends.slurm.squeue import JobRow
from clusterjob.node.logs.events import EventLog
from clusterjob.node.logs.job_dir import EVENTS
from clusterjob.node.verdict import JobState


def gate(user: User, command: str) -> Path:
    """Block the first call of a command until the returned file exists."""
    notes = user.command_first_on_path(
        command,
        '[ -s "$NOTES" ] || { echo waits >> "$NOTES"; '
        'while [ ! -e "$NOTES.go" ]; do sleep 0.1; done; }\nexec "$REAL" "$@"\n',
    )
    return notes.with_name(f"{notes.name}.go")


# -- srun ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["agent", "srun"])
def test_srun_that_cannot_create_step_is_retried(user: User, launcher: str) -> None:
    """The controller stops between the start of the batch script and srun."""
    go = gate(user, "srun")
    job_id = user.submit(GUEST, "--nodes", "2", "--launcher", launcher)
    wait_until(
        lambda: go.with_suffix("").read_text(), TEST_TIMEOUT, "the batch script to call srun"
    )
    user.slurm.stop_controller()
    go.touch()
    out = user.directory_of(job_id) / "logs" / "slurm.out"
    wait_until(lambda: "srun is run again" in out.read_text(), TEST_TIMEOUT, "srun to fail")
    user.slurm.start_controller()
    user.wait_for("up0", "up1", timeout=PROMPT * 3)
    user.path("leave").touch()
    assert user("wait", job_id).returncode == 0


@pytest.mark.parametrize(
    "error",
    [
        "Requested node configuration is not available",
        pytest.param("Job/step already completing or completed", marks=pytest.mark.slow),
    ],
)
def test_srun_that_is_refused_is_not_retried(user: User, error: str) -> None:
    notes = user.command_first_on_path(
        "srun",
        f'echo >> "$NOTES"; echo "srun: error: Unable to create step for job 1: {error}" >&2; '
        "exit 1\n",
    )
    message = user.run("pass", code=1).stderr
    assert error in message
    assert notes.read_text() == "\n"


# -- cancel --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_cancel_stops_agents_while_controller_is_down(user: User) -> None:
    job_id = user.submit(SLEEPER, "--nodes", "2", until=("up0", "up1"))
    pending = user.submit(SLEEPER, "--set", "hold=true")
    user.slurm.stop_controller()
    message = user("cancel", job_id, pending, timeout=180).stderr
    assert "Slurm does not answer" in message
    assert "the job's agents stop it" in message
    wait_for_no_processes(PROMPT)
    assert user("wait", job_id, code=143).returncode == 143
    user.slurm.start_controller()
    assert user.slurm_job(pending)["JobState"] == "PENDING"
    user.force_new_query()
    user("status", pending)
    assert user.slurm.wait_for_job(user.slurm_id(pending))["JobState"] == "CANCELLED"
    assert user("wait", pending, code=143).returncode == 143
    assert not (user.directory_of(pending) / "scancel.pending").exists()


@pytest.mark.slow
def test_cancel_of_job_without_agents_fails_until_slurm_answers(user: User) -> None:
    job_id = user.submit(
        SLEEPER.replace("RANK", "SLURM_PROCID"), "--launcher", "srun", until=("up0",)
    )
    user.command_first_on_path(
        "scancel",
        "echo 'scancel: error: Unable to contact slurm controller (connect failure)' >&2; exit 1\n",
    )
    message = user("cancel", job_id, code=1).stderr
    assert f"job {job_id} has no agents that could stop it" in message
    (user.directory.parent / "bin" / "scancel").unlink()
    user.force_new_query()
    user("status", job_id)
    assert user("wait", job_id, code=143).returncode == 143
    wait_for_no_processes(PROMPT)


# -- job ends ------------------------------------------------------------------------------------


def batch_shell_of(user: User, number: str) -> int:
    """Return the shell of a job's batch script."""
    for child in (child for pid in user.slurm.stepd_pids() for child in below(pid)):
        found = environ(child)
        own = found.get("SLURM_JOB_ID") == number and found.get("SLURM_STEP_ID") != "0"
        if own and "slurm_script" in command_line(child):
            return child
    raise AssertionError(f"no batch shell of job {number}")


@pytest.mark.slow
def test_killed_batch_shell_fails_job(user: User) -> None:
    """Slurm then ends the steps by SIGTERM, although no user has cancelled the job."""
    job_id = user.submit(SLEEPER, "--nodes", "2", until=("up0", "up1"))
    number = user.slurm_id(job_id)
    os.kill(batch_shell_of(user, number), signal.SIGKILL)
    user.slurm.wait_for_job(number)
    user.force_new_query()
    message = user("wait", job_id, code=137).stderr
    assert re.search(
        rf"job {job_id} FAILED: the job's batch shell was killed by SIGKILL: Slurm reports FAILED",
        message,
    ), message
    wait_for_no_processes(PROMPT)


def test_reason_of_node_fail_names_node(user: User) -> None:
    """The test marks the node as down, as Slurm does after SlurmdTimeout."""
    job_id = user.submit(SLEEPER, "--nodes", "2", "--nodelist", "n2,n3", until=("up0", "up1"))
    user.slurm.kill_node(3)
    user.slurm.run("scontrol", "update", "NodeName=n3", "State=DOWN", "Reason=test")
    user.slurm.wait_for_job(user.slurm_id(job_id), "NODE_FAIL")
    user.force_new_query()
    assert "NODE_FAIL: a node of the job failed: node n3" in user("wait", job_id, code=1).stderr
    notes = user.command_first_on_path("scontrol", 'echo >> "$NOTES"\nexec "$REAL" "$@"\n')
    user.force_new_query()
    assert "node n3" in user.job(job_id)["reason"]
    assert notes.read_text() == ""  # a recorded end is not queried again


def test_node_fail_reason_names_node_only_if_slurm_does(tmp_path: Path) -> None:
    named = job_end.of_slurm(
        JobRow("7", "NODE_FAIL", failed_node="one of n[2-3]"),
        None,
        job_dir=tmp_path,
        started_at=None,
    )
    assert named.reason == "Slurm reports NODE_FAIL: a node of the job failed: one of n[2-3]"
    ended = job_end.of_slurm(JobRow("7", "NODE_FAIL"), None, job_dir=tmp_path, started_at=None)
    assert (ended.state, ended.reason) == (
        JobState.LOST,
        "Slurm reports NODE_FAIL: a node of the job failed",
    )
    EventLog(tmp_path / EVENTS).add("lost", node_rank=1, host="n3", why="no message for 10 s")
    ended = job_end.of_slurm(JobRow("7", "NODE_FAIL"), None, job_dir=tmp_path, started_at=None)
    assert ended.reason.endswith("a node of the job failed; its agents lost n3")


@pytest.mark.slow
def test_accounting_has_signal_and_nodes_of_forgotten_jobs(user_accounted: User) -> None:
    """Cases: a killed batch shell and a failed node, after squeue has forgotten the jobs."""
    user = user_accounted
    killed = user.submit(SLEEPER, "--nodelist", "n1", until=("up0",))
    number = user.slurm_id(killed)
    os.kill(batch_shell_of(user, number), signal.SIGKILL)
    user.slurm.wait_for_job(number)
    user.path("up0").unlink()
    lost = user.submit(SLEEPER, "--nodes", "2", "--nodelist", "n2,n3", until=("up0", "up1"))
    user.slurm.kill_node(3)
    user.slurm.run("scontrol", "update", "NodeName=n3", "State=DOWN", "Reason=test")
    user.slurm.wait_for_job(user.slurm_id(lost), "NODE_FAIL")
    ids = {user.slurm_id(killed): "FAILED", user.slurm_id(lost): "NODE_FAIL"}
    # A row without its directory is not complete yet: it also lacks some of the job's nodes.
    wanted = {
        user.slurm_id(job_id): (time.time() - 600, f"/jobs/{job_id}") for job_id in (killed, lost)
    }

    def accounted() -> dict[str, JobRow]:
        rows = Accounting(Client()).ended(wanted) or {}
        return rows if {key: row.state for key, row in rows.items()} == ids else {}

    rows = wait_until(accounted, TEST_TIMEOUT, "the rows, which come in stages")
    assert [rows[key].signal for key in ids] == [signal.SIGKILL, 0]
    assert [rows[key].failed_node for key in ids] == ["", "one of n[2-3]"]


# -- lease ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_job_hidden_from_squeue_is_unknown_until_lease_ends(user: User) -> None:
    """The job still renews its lease; a minute after the last renewal it is LOST.

    A verdict that arrives later replaces LOST.
    """
    job_id = user.submit(GUEST, "--nodes", "2", until=("up0", "up1"))
    user.command_first_on_path("squeue", "exit 0\n")  # squeue lists no jobs
    handle = json.loads((user.home / "records" / f"{job_id}.json").read_text())["handle"]
    user.change_record(job_id, handle=handle | {"data": handle["data"] | {"at": time.time() - 100}})
    user.force_new_query()
    job = user.job(job_id)
    assert (job["state"], "Slurm does not show it" in job["reason"]) == ("UNKNOWN", True)
    alive = user.directory_of(job_id) / "ends" / "alive"
    begin = alive.stat().st_mtime
    wait_until(lambda: alive.stat().st_mtime > begin, PROMPT, "another renewal of the lease")

    os.utime(alive, (begin - 100, begin - 100))
    user.force_new_query()
    lost = wait_until(
        lambda: (
            user.job(job_id)["state"] == "LOST"
            or (user.force_new_query(), os.utime(alive, (1, 1)))[0]
        ),
        PROMPT,
    )
    assert lost
    assert (
        json.loads((user.home / "records" / f"{job_id}.json").read_text())["end"]["state"] == "LOST"
    )
    user.path("leave").touch()
    assert user.wait_for_state(job_id, "SUCCEEDED", timeout=PROMPT)["exit_code"] == 0
    assert (
        json.loads((user.home / "records" / f"{job_id}.json").read_text())["end"]["state"]
        == "SUCCEEDED"
    )
    assert user("wait", job_id).returncode == 0
