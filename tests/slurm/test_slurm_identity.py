"""Find a Slurm job despite changed comments and sbatch wrappers."""

from __future__ import annotations

import pytest
from slurm_user import GUEST, SLEEPER, User

from clusterjob.backends.slurm.client import Client
from clusterjob.backends.slurm.queue import Queue
from clusterjob.node.verdict import JobState, Verdict

# -- changed comments ----------------------------------------------------------------------------


def test_job_with_changed_comment_is_followed_and_cancelled(user: User) -> None:
    job_id = user.submit(GUEST, "--nodes", "2", until=("up0", "up1"))
    user.slurm.run("scontrol", "update", f"JobId={user.slurm_id(job_id)}", "Comment=of-the-site")
    user.force_new_query()
    assert user.wait_for_state(job_id, "RUNNING")["backend_id"] == user.slurm_id(job_id)
    user("cancel", job_id)
    assert user("wait", job_id, code=143).returncode == 143
    assert user.slurm.wait_for_job(user.slurm_id(job_id))["JobState"] == "CANCELLED"


def test_job_with_changed_comment_and_directory_is_found_by_name(
    user: User,
) -> None:
    job_id = user.submit(SLEEPER, "--set", "hold=true")
    namesake = user.slurm.submit(
        "--hold", "--output=/dev/null", "--begin=now+1hour", "--job-name=script", script="true"
    )
    number = user.slurm_id(job_id)
    user.slurm.run("scontrol", "update", f"JobId={number}", "Comment=x", "WorkDir=/tmp")
    user.force_new_query()
    assert "JobHeldUser" in user.job(job_id)["reason"]
    rows = Queue(Client(), user.directory).poll().rows
    assert (rows[number].directory, rows[number].comment) == ("/tmp", "x")
    user("cancel", job_id)
    assert (user.slurm.job(number)["JobState"], user.slurm.job(namesake)["JobState"]) == (
        "CANCELLED",
        "PENDING",
    )


def test_job_with_guessed_end_is_cancelled_if_slurm_shows_it(user: User) -> None:
    job_id = user.submit(SLEEPER, "--set", "hold=true")
    lost = Verdict(JobState.LOST, 1, reason="a guess", ended_at="2020-01-01T00:00:00Z").to_json()
    user.change_record(job_id, end=lost, provisional=True)
    user.force_new_query()
    assert "is cancelled" in user("cancel", job_id).stderr
    assert user.slurm.job(user.slurm_id(job_id))["JobState"] == "CANCELLED"


# -- wrappers around sbatch ----------------------------------------------------------------------

REAL = '"$REAL" "$@" || exit'


@pytest.mark.parametrize(
    "wrapper",
    [
        f"{REAL}\necho; echo 'Welcome to the cluster. 3 jobs are yours.'",
        f"echo 42; {REAL}; echo 4711",  # two numbers that are not the id
        f"{REAL} > /dev/null",
        f"{REAL} > /dev/null; echo 'quota: cannot write the statistics' >&2; exit 7",
    ],
)
def test_job_submitted_by_sbatch_wrapper_is_found(user: User, wrapper: str) -> None:
    user.command_first_on_path("sbatch", wrapper + "\n")
    job_id = user.submit(GUEST, until=("up0",))
    found = user.slurm.run("squeue", "--noheader", "--format=%A %k").stdout.split()
    assert found == [user.slurm_id(job_id), f"clusterjob:{job_id}"]
    user.path("leave").touch()
    assert user("wait", job_id).returncode == 0


def test_wrapper_that_refuses_job_leaves_no_files(user: User) -> None:
    user.command_first_on_path(
        "sbatch",
        'case "$*" in *--test-only*) exec "$REAL" "$@" ;; esac\n'
        'echo "no more jobs today" >&2; exit 1\n',
    )
    assert "Slurm refuses the job: no more jobs today" in user.refused()
