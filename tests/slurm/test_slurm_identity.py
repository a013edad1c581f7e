"""A job is found where a site hides its partition or changes its comment, and where sbatch is a
wrapper that says more than the id.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import slurm_user
from procs import wait_until
from slurm_cluster import SlurmCluster
from slurm_user import GUEST, PROMPT, SLEEPER, User, user_of

from clusterjob.backends.slurm.client import Client
from clusterjob.backends.slurm.queue import Queue
from clusterjob.node.verdict import JobState, Verdict

ACCOUNT = "games"  # an account of every Debian, which no daemon uses


def ask_anew(user: User) -> None:
    for path in user.home.glob("slurm/*.json"):
        path.unlink()


# -- hidden partitions ----------------------------------------------------------------------------------------------------


@pytest.fixture
def ordinary(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[User]:
    """Return a user who is not root: root sees hidden partitions without asking. The partition
    ``small`` is hidden.
    """
    python = shutil.which("python3", path="/usr/bin:/bin")
    if os.geteuid() or python is None:
        pytest.skip("it takes root, and an interpreter that everybody can read")
    identity = pwd.getpwnam(ACCOUNT)
    there = Path(
        tempfile.mkdtemp(prefix="ordinary-", dir="/tmp")
    )  # pytest's own directories are root's alone
    slurm.directory.parent.chmod(0o711)
    # clusterjob itself may read all files, as where its interpreter lies below /root; Slurm knows
    # its user alone.
    caps = ("--inh-caps=+dac_override", "--ambient-caps=+dac_override")
    become = [
        "setpriv",
        f"--reuid={identity.pw_uid}",
        f"--regid={identity.pw_gid}",
        "--clear-groups",
        *caps,
    ]
    monkeypatch.setattr(slurm_user, "CLUSTERJOB", [*become, *slurm_user.CLUSTERJOB])
    try:
        for name, value in (
            ("CLUSTERJOB_HOME", "home"),
            ("XDG_CACHE_HOME", "cache"),
            ("XDG_CONFIG_HOME", "config"),
            ("HOME", "home"),
        ):
            (there / value).mkdir(exist_ok=True)
            monkeypatch.setenv(name, str(there / value))
        with user_of(slurm, there, monkeypatch) as user:
            monkeypatch.setenv("CLUSTERJOB_PYTHON", python)
            for path in (there, *there.rglob("*")):
                shutil.chown(path, identity.pw_uid, identity.pw_gid)
            slurm.run("scontrol", "update", "PartitionName=small", "Hidden=YES")
            yield user
    finally:
        slurm.run("scontrol", "update", "PartitionName=small", "Hidden=NO")
        shutil.rmtree(there)


def test_job_in_hidden_partition_is_followed_and_cancelled(ordinary: User) -> None:
    job_id = ordinary.submit(GUEST, "--partition", "small")
    ordinary.wait_for("up0")
    ask_anew(ordinary)
    assert ordinary.wait_for_state(job_id, "RUNNING")["backend_id"] == ordinary.slurm_id(job_id)
    other = ordinary.submit(SLEEPER, "--partition", "small", "--set", "hold=true")
    ask_anew(ordinary)
    assert ordinary.job(other)["state"] == "PENDING"
    ordinary("cancel", other)
    assert ordinary.slurm_job(other)["JobState"] == "CANCELLED"
    ordinary.path("leave").touch()
    assert ordinary("wait", job_id).returncode == 0


def test_time_limit_of_hidden_partition_is_known(ordinary: User) -> None:
    """Its own limit of one hour holds, of which `scontrol show partition` says nothing without
    --all.
    """
    said = ordinary(
        "submit",
        "--cluster",
        "slurm",
        "--partition",
        "small",
        "--time",
        "61m",
        ordinary.script("pass"),
        code=1,
    ).stderr
    assert "above that of the partition small" in said


# -- changed comments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("comment", ["of-the-site", ""])
def test_job_whose_comment_was_changed_is_followed_and_cancelled(user: User, comment: str) -> None:
    job_id = user.submit(GUEST, "--nodes", "2")
    user.wait_for("up0", "up1")
    user.slurm.run("scontrol", "update", f"JobId={user.slurm_id(job_id)}", f"Comment={comment}")
    ask_anew(user)
    assert user.wait_for_state(job_id, "RUNNING")["backend_id"] == user.slurm_id(job_id)
    user("cancel", job_id)
    assert user("wait", job_id, code=143).returncode == 143
    assert user.slurm.wait_for_job(user.slurm_id(job_id))["JobState"] == "CANCELLED"


def test_job_whose_comment_and_directory_were_changed_is_known_by_name_and_submit_time(
    user: User,
) -> None:
    job_id = user.submit(SLEEPER, "--set", "hold=true")
    namesake = user.slurm.submit(
        "--hold", "--output=/dev/null", "--begin=now+1hour", "--job-name=script", script="true"
    )
    number = user.slurm_id(job_id)
    user.slurm.run("scontrol", "update", f"JobId={number}", "Comment=x", "WorkDir=/tmp")
    ask_anew(user)
    assert "JobHeldUser" in user.job(job_id)["reason"]
    rows = Queue(Client(), user.directory).look().rows
    assert (rows[number].directory, rows[number].comment) == ("/tmp", "x")
    user("cancel", job_id)
    assert (user.slurm.job(number)["JobState"], user.slurm.job(namesake)["JobState"]) == (
        "CANCELLED",
        "PENDING",
    )


def change_record(user: User, job_id: str, **changes: Any) -> None:
    path = user.home / "records" / f"{job_id}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    ask_anew(user)


def test_job_whose_end_was_guessed_is_cancelled_where_slurm_shows_it(user: User) -> None:
    job_id = user.submit(SLEEPER, "--set", "hold=true")
    lost = Verdict(JobState.LOST, 1, reason="a guess", ended_at="2020-01-01T00:00:00Z").to_json()
    change_record(user, job_id, end=lost, provisional=True)
    assert "is cancelled" in user("cancel", job_id).stderr
    assert user.slurm.job(user.slurm_id(job_id))["JobState"] == "CANCELLED"


def test_cancel_spares_another_job_that_got_the_id(user: User) -> None:
    """Whether the job's end was guessed, or Slurm could not be told when it was cancelled."""
    job_id = user.submit(SLEEPER, "--set", "hold=true")
    other = str(
        user.slurm.submit("--hold", "--output=/dev/null", "--job-name=other", script="true")
    )
    own = user.slurm_id(job_id)
    handle = json.loads((user.home / "records" / f"{job_id}.json").read_text())["handle"]
    handle = {
        **handle,
        "id": other,
        "data": {**handle["data"], "ids": [other], "at": handle["data"]["at"] - 3600},
    }
    lost = Verdict(JobState.LOST, 1, reason="a guess", ended_at="2020-01-01T00:00:00Z").to_json()
    change_record(user, job_id, handle=handle, end=lost, provisional=True)
    assert "had ended already" in user("cancel", job_id).stderr
    change_record(user, job_id, end=None, provisional=False)
    (user.home / "jobs" / job_id / "scancel.pending").touch()
    user("status", job_id)
    wait_until(
        lambda: not (user.home / "jobs" / job_id / "scancel.pending").exists(),
        PROMPT,
        "the answer of Slurm",
    )
    assert user.slurm.job(other)["JobState"] == "PENDING"
    user.slurm.run("scancel", other, own)


@pytest.fixture
def commenting_site(_slurm_none: SlurmCluster) -> Iterator[None]:
    """Give the cluster a job_submit.lua that writes comments of its own."""
    script = _slurm_none.conf.parent / "job_submit.lua"
    script.write_text(
        "function slurm_job_submit(job, parts, uid)\n  job.comment = 'site'\n  return slurm.SUCCESS\nend\n"
        "function slurm_job_modify(job, record, parts, uid)\n  return slurm.SUCCESS\nend\nreturn slurm.SUCCESS\n"
    )
    with _slurm_none.configured(JobSubmitPlugins="lua"):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("commenting_site")
def test_plug_in_that_writes_comments_hides_no_job(user: User) -> None:
    """Nor one whose id the submitter could not note."""
    job_id = user.submit(GUEST)
    user.wait_for("up0")
    assert user.slurm_job(job_id)["Comment"] == "site"
    user.command_first_on_path(
        "sbatch",
        'case "$*" in *--test-only*) exec "$REAL" "$@" ;; esac\n"$REAL" "$@"\nkill -KILL $PPID\n',
    )
    user.start("submit", "--cluster", "slurm", user.script(GUEST)).wait(PROMPT)
    [lost] = {path.stem for path in (user.home / "records").glob("*.json")} - {job_id}
    ask_anew(user)
    assert user.wait_for_state(lost, "RUNNING")["backend_id"] != user.slurm_id(job_id)
    assert user.wait_for_state(job_id, "RUNNING")["backend_id"] == user.slurm_id(job_id)
    user.path("leave").touch()
    assert [user("wait", one).returncode for one in (job_id, lost)] == [0, 0]


# -- wrappers around sbatch -----------------------------------------------------------------------------------------------

REAL = '"$REAL" "$@" || exit'


@pytest.mark.parametrize(
    "wrapper",
    [
        f"{REAL}\necho; echo 'Welcome to the cluster. 3 jobs are yours.'",
        f"echo 'Welcome'; {REAL}; echo '12 nodes are free'; echo Bye",
        f"echo 42; {REAL}; echo 4711",  # which number is the id?
        f"{REAL} > /dev/null; echo 'your job was taken'",
        f"{REAL} > /dev/null",
        f"{REAL}; exit 1",
        f"{REAL} > /dev/null; echo 'quota: cannot write the statistics' >&2; exit 7",
    ],
)
def test_job_that_a_wrapper_has_submitted_is_not_lost(user: User, wrapper: str) -> None:
    user.command_first_on_path("sbatch", wrapper + "\n")
    job_id = user.submit(GUEST)
    user.wait_for("up0")
    found = user.slurm.run("squeue", "--noheader", "--format=%A %k").stdout.split()
    assert found == [user.slurm_id(job_id), f"clusterjob:{job_id}"]
    user.path("leave").touch()
    assert user("wait", job_id).returncode == 0


def test_every_piece_of_an_array_that_a_wrapper_has_submitted_is_known(user: User) -> None:
    user.command_first_on_path("sbatch", f"{REAL} > /dev/null; exit 1\n")
    job_id = user.submit("pass", "--array", "0-1,1002-1003")
    assert user("wait", job_id).returncode == 0
    assert len({job["backend_id"].partition("_")[0] for job in user.jobs(job_id)}) == 2


def test_wrapper_that_refuses_leaves_nothing(user: User) -> None:
    user.command_first_on_path(
        "sbatch",
        'case "$*" in *--test-only*) exec "$REAL" "$@" ;; esac\necho "no more jobs today" >&2; exit 1\n',
    )
    assert "Slurm refuses the job: no more jobs today" in user.refused()


def test_wrapper_that_neither_submits_nor_fails_leaves_a_record(user: User) -> None:
    """Slurm may have the job: nothing of it is deleted."""
    user.command_first_on_path(
        "sbatch", 'case "$*" in *--test-only*) exec "$REAL" "$@" ;; esac\necho submitted\n'
    )
    said = user("submit", "--cluster", "slurm", user.script("pass"), code=1).stderr
    assert (
        "nobody knows whether Slurm has taken the job: sbatch printed no job id: 'submitted'"
        in said
    )
    assert "do not submit it again before" in said
    [record] = (user.home / "records").glob("*.json")
    assert user.job(record.stem)["state"] == "UNKNOWN"


def test_wrapper_that_prints_an_id_and_fails_leaves_a_record(user: User) -> None:
    """Slurm has taken the job, whatever code the wrapper ends with, and squeue may not show it yet."""
    user.command_first_on_path(
        "sbatch",
        'case "$*" in *--test-only*) exec "$REAL" "$@" ;; esac\necho Submitted batch job 999999; echo "quota" >&2; exit 1\n',
    )
    said = user("submit", "--cluster", "slurm", user.script("pass"), code=1).stderr
    assert "nobody knows whether Slurm has taken the job: quota" in said
    [record] = (user.home / "records").glob("*.json")
    assert user.job(record.stem)["state"] == "UNKNOWN"


def test_controller_that_goes_after_a_wrapper_failed_leaves_a_record(user: User) -> None:
    """The wrapper fails, and squeue cannot tell whether Slurm has the job."""
    user.command_first_on_path(
        "sbatch",
        'case "$*" in *--test-only*) exec "$REAL" "$@" ;; esac\n"$REAL" "$@" > /dev/null; exit 1\n',
    )
    user.command_first_on_path(
        "squeue",
        "echo 'slurm_load_jobs error: Socket timed out on send/recv operation' >&2; exit 1\n",
    )
    said = user("submit", "--cluster", "slurm", user.script(GUEST), code=1).stderr
    assert "nobody knows whether Slurm has taken the job" in said
    user.wait_for("up0")
    (user.directory.parent / "bin" / "squeue").unlink()
    [record] = (user.home / "records").glob("*.json")
    ask_anew(user)
    wait_until(lambda: user.job(record.stem)["state"] == "RUNNING", PROMPT)
    user.path("leave").touch()
    assert user("wait", record.stem).returncode == 0
