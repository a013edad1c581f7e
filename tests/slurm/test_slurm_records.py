"""Identity of Slurm jobs: killed submitters, silent controllers, reused ids, forgotten jobs."""

from __future__ import annotations

import json
import signal
import time

import pytest
from procs import TEST_TIMEOUT, wait_for_no_processes, wait_until
from slurm_user import GUEST, PROMPT, SLEEPER, User

FORGETTING = 120.0  # seconds; with MinJobAge=2 slurmctld forgets an ended job after about 10 s


def only_record(user: User) -> str:
    [path] = (user.home / "records").glob("*.json")
    return path.stem


@pytest.mark.slow
def test_job_is_found_after_submitter_is_killed_after_sbatch(user: User) -> None:
    """The record has no Slurm id; the comment of the job identifies it."""
    user.command_first_on_path(
        "sbatch",
        'case "$*" in *--test-only*) exec "$REAL" "$@" ;; esac\n"$REAL" "$@"\nkill -KILL $PPID\n',
    )
    process = user.start("submit", "--cluster", "slurm", user.script(GUEST))
    assert process.wait(TEST_TIMEOUT) == -signal.SIGKILL
    job_id = only_record(user)
    assert json.loads(user.record_of(job_id).read_text())["handle"] is None
    user.wait_for("up0")
    assert user.wait_for_state(job_id, "RUNNING")["id"] == job_id
    assert user.slurm_id(job_id).isdigit()
    user.path("leave").touch()
    assert user("wait", job_id).returncode == 0

    # The first status query comes when Slurm no longer answers.
    user.change_record(job_id, handle=None, end=None)
    user.slurm.stop_controller()
    assert user.job(job_id)["state"] == "SUCCEEDED"
    user.slurm.start_controller()


def test_job_is_lost_after_submitter_is_killed_before_sbatch(user: User) -> None:
    user.command_first_on_path(
        "sbatch", 'case "$*" in *--test-only*) exec "$REAL" "$@" ;; esac\nkill -KILL $PPID\n'
    )
    assert (
        user.start("submit", "--cluster", "slurm", user.script("pass")).wait(TEST_TIMEOUT)
        == -signal.SIGKILL
    )
    job_id = only_record(user)
    assert user.job(job_id)["state"] == "UNKNOWN"
    user.change_record(job_id, submitted_at="2026-01-01T00:00:00.000Z")
    ended = user.job(job_id)
    assert (ended["state"], ended["reason"]) == (
        "LOST",
        "the command that submitted it died before Slurm accepted the job",
    )
    assert user("wait", job_id, code=1).returncode == 1


@pytest.mark.parametrize("options", [(), pytest.param(("--array", "0-1"), marks=pytest.mark.slow)])
def test_ctrl_c_during_sbatch_cancels_submitted_job(user: User, options: tuple[str, ...]) -> None:
    submitted = '"$REAL" "$@" > /dev/null\nkill -INT $PPID\nsleep 5\n'
    user.command_first_on_path(
        "sbatch", f'case "$*" in *--test-only*) exec "$REAL" "$@" ;; esac\n{submitted}'
    )
    process = user.start("run", "--cluster", "slurm", *options, user.script(SLEEPER))
    assert process.wait(TEST_TIMEOUT) == 130
    user.force_new_query()
    job_id = only_record(user)
    assert user("wait", job_id, code=143).returncode == 143

    def states() -> set[str]:
        lines = user.slurm.run(
            "squeue", "--noheader", "--states=all", "--array", "--format=%T|%k"
        ).stdout.splitlines()
        return {
            line.partition("|")[0] for line in lines if line.endswith(f"clusterjob:{job_id}")
        } - {"COMPLETING"}

    assert wait_until(states, TEST_TIMEOUT) == {"CANCELLED"}
    wait_for_no_processes(PROMPT)


@pytest.mark.slow
def test_job_submitted_to_frozen_controller_is_found_and_runs_once_or_is_cancelled(
    user: User,
) -> None:
    """It is unknown whether the controller accepted the jobs, until it runs again."""
    freeze = f"kill -STOP {user.slurm._running('slurmctld')}"
    user.command_first_on_path(
        "sbatch", f'case "$*" in *--test-only*) ;; *) {freeze} ;; esac\nexec "$REAL" "$@"\n'
    )
    message = user("submit", "--cluster", "slurm", user.script(GUEST), code=1, timeout=180).stderr
    assert "it is unknown whether Slurm accepted the job" in message
    assert "do not submit it again" in message
    job_id = only_record(user)
    user.slurm.thaw_controller()
    user.wait_for("up0")
    user.force_new_query()
    assert user.wait_for_state(job_id, "RUNNING")["backend_id"] in (None, user.slurm_id(job_id))
    assert comments(user).count(f"clusterjob:{job_id}") == 1
    user.path("leave").touch()
    assert user("wait", job_id).returncode == 0

    user.path("up0").unlink()
    user("submit", "--cluster", "slurm", user.script(SLEEPER), code=1, timeout=180)
    [doubtful] = {path.stem for path in user.home.glob("records/*.json")} - {job_id}
    user("cancel", doubtful)
    user.slurm.thaw_controller()
    wait_until(lambda: f"clusterjob:{doubtful}" in comments(user), TEST_TIMEOUT)
    user.force_new_query()
    user.wait_for_state(doubtful, "CANCELLED")
    assert not user.path("up0").exists()
    wait_for_no_processes(PROMPT)


def comments(user: User) -> list[str]:
    """Return the comments of all jobs that Slurm knows."""
    return user.slurm.run("squeue", "--noheader", "--states=all", "--format=%k").stdout.split()


def test_other_job_with_reused_id_is_not_mistaken_for_job(user: User) -> None:
    job_id = user.submit(SLEEPER, "--set", "hold=true")
    other = user.slurm.submit(
        "--hold", "--output=/dev/null", "--comment=clusterjob:other", script="sleep 1000"
    )
    data = json.loads(user.record_of(job_id).read_text())["handle"]
    user.slurm.run("scancel", data["id"])
    user.change_record(
        job_id,
        handle=data | {"id": str(other), "data": data["data"] | {"at": time.time() - 100}},
    )
    user.force_new_query()
    ended = user.job(job_id)
    assert (ended["state"], "Slurm does not know it any more" in ended["reason"]) == ("LOST", True)
    assert "had ended already" in user("cancel", job_id).stderr
    # Also after a cancel that did not reach Slurm.
    user.change_record(job_id, end=None, provisional=False)
    user.force_new_query()
    pending = user.directory_of(job_id) / "scancel.pending"
    pending.touch()
    user("status", job_id)
    wait_until(lambda: not pending.exists(), PROMPT, "the answer of Slurm")
    assert user.slurm.job(other)["JobState"] == "PENDING"


@pytest.mark.slow
def test_ends_of_forgotten_jobs_come_from_directory_then_accounting(user_accounted: User) -> None:
    user = user_accounted
    with user.slurm.configured(MinJobAge=2):
        good = user.submit("print('good')")
        bad = user.submit("import sys; sys.exit(4)", "--launcher", "srun")
        cancelled = user.submit(SLEEPER, "--set", "hold=true")
        again = user.submit("import time\ntime.sleep(1)", "--set", "hold=true")
        ids = {job_id: user.slurm_id(job_id) for job_id in (good, bad, cancelled, again)}
        user.slurm.run("scancel", ids[cancelled])
        user.slurm.wait_for_job(ids[good], "COMPLETED")
        # as if it belonged to another job
        user.slurm.run("scontrol", "update", f"JobId={ids[again]}", "Comment=another")
        user.slurm.run("scancel", ids[again])

        def forgotten() -> bool:
            return not user.slurm.run("squeue", "--noheader", "--states=all").stdout.strip()

        wait_until(forgotten, FORGETTING, "slurmctld to forget")
        jobs = f"--jobs={ids[cancelled]},{ids[again]}"
        sacct = ("sacct", "--noheader", "--parsable2", "--allocations", "--format=State", jobs)

        def accounted() -> bool:
            states = user.slurm.run(*sacct, check=False).stdout.split("\n")[:-1]
            return len(states) == 2 and all(state.startswith("CANCELLED") for state in states)

        wait_until(accounted, FORGETTING, "the rows, which come in stages")
        user.force_new_query()
        for job_id in ids:
            user.change_record(job_id, end=None)
            data = json.loads(user.record_of(job_id).read_text())["handle"]
            user.change_record(
                job_id,
                handle=data | {"data": data["data"] | {"at": data["data"]["at"] - 5}},
            )
        found = {job["id"]: job for job in user.jobs()}
        assert [found[job_id]["state"] for job_id in (good, bad)] == ["SUCCEEDED", "FAILED"]
        assert found[bad]["failure"]["exit_code"] == 4
        assert [found[job_id]["state"] for job_id in (cancelled, again)] == ["CANCELLED"] * 2


@pytest.mark.slow
def test_federation_cluster_name_is_recorded_with_id(user_accounted: User) -> None:
    """`sbatch --clusters` prints ``id;cluster``."""
    user = user_accounted
    job_id = user.submit(GUEST, "--set", "clusters=test")
    handle = json.loads(user.record_of(job_id).read_text())["handle"]
    assert (handle["id"].isdigit(), handle["data"]["cluster"]) == (True, "test")
    user.wait_for("up0")
    assert user.wait_for_state(job_id, "RUNNING")["backend_id"] == handle["id"]
    user("cancel", job_id)
    assert user.wait_for_state(job_id, "CANCELLED")["exit_code"] == 143
