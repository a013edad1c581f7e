"""Which job of Slurm's is ours: submitters that die, controllers that do not answer, ids that come
again, jobs that Slurm has forgotten.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from procs import PATIENCE, nothing_left, wait_until
from slurm_user import GUEST, PROMPT, SLEEPER, User

FORGETTING = 120.0  # seconds; with MinJobAge=2 slurmctld forgets an ended job after some ten


def record_of(user: User, job_id: str) -> Path:
    return user.home / "records" / f"{job_id}.json"


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def ask_anew(user: User) -> None:
    """Have the next command ask Slurm, however short ago that was done."""
    for path in user.home.glob("slurm/*.json"):
        path.unlink()


def the_only_record(user: User) -> str:
    [path] = (user.home / "records").glob("*.json")
    return path.stem


@pytest.mark.slow
def test_a_submitter_that_is_killed_after_sbatch_leaves_a_job_that_is_found(user: User) -> None:
    """By its comment: the record is there, and says nothing of where the job is."""
    user.command_first_on_path(
        "sbatch",
        'case "$*" in *--test-only*) exec "$REAL" "$@" ;; esac\n"$REAL" "$@"\nkill -KILL $PPID\n',
    )
    process = user.start("submit", "--cluster", "slurm", user.script(GUEST))
    assert process.wait(PATIENCE) == -signal.SIGKILL
    job_id = the_only_record(user)
    assert json.loads(record_of(user, job_id).read_text())["handle"] is None
    user.wait_for("up0")
    assert user.wait_for_state(job_id, "RUNNING")["id"] == job_id
    assert user.slurm_id(job_id).isdigit()
    user.path("leave").touch()
    assert user("wait", job_id).returncode == 0

    # One that nobody has asked for until Slurm had nothing to say of it any more.
    change(record_of(user, job_id), handle=None, end=None)
    user.slurm.stop_controller()
    assert user.job(job_id)["state"] == "SUCCEEDED"
    user.slurm.start_controller()


def test_a_submitter_that_is_killed_before_sbatch_leaves_a_job_that_never_was(user: User) -> None:
    user.command_first_on_path(
        "sbatch", 'case "$*" in *--test-only*) exec "$REAL" "$@" ;; esac\nkill -KILL $PPID\n'
    )
    assert (
        user.start("submit", "--cluster", "slurm", user.script("pass")).wait(PATIENCE)
        == -signal.SIGKILL
    )
    job_id = the_only_record(user)
    assert user.job(job_id)["state"] == "UNKNOWN"
    change(record_of(user, job_id), submitted_at="2026-01-01T00:00:00.000Z")
    ended = user.job(job_id)
    assert (ended["state"], ended["reason"]) == (
        "LOST",
        "the command that submitted it died before Slurm had taken the job",
    )
    assert user("wait", job_id, code=1).returncode == 1


@pytest.mark.parametrize("options", [(), ("--array", "0-1")])
def test_ctrl_c_while_sbatch_has_just_submitted_the_job_cancels_it(
    user: User, options: tuple[str, ...]
) -> None:
    submitted = '"$REAL" "$@" > /dev/null\nkill -INT $PPID\nsleep 5\n'
    user.command_first_on_path(
        "sbatch", f'case "$*" in *--test-only*) exec "$REAL" "$@" ;; esac\n{submitted}'
    )
    process = user.start("run", "--cluster", "slurm", *options, user.script(SLEEPER))
    assert process.wait(PATIENCE) == 130
    ask_anew(user)
    job_id = the_only_record(user)
    assert user("wait", job_id, code=143).returncode == 143

    def states() -> set[str]:
        lines = user.slurm.run(
            "squeue", "--noheader", "--states=all", "--array", "--format=%T|%k"
        ).stdout.splitlines()
        return {
            line.partition("|")[0] for line in lines if line.endswith(f"clusterjob:{job_id}")
        } - {"COMPLETING"}

    assert wait_until(states, PATIENCE) == {"CANCELLED"}
    nothing_left(PROMPT)


@pytest.mark.slow
def test_a_controller_that_does_not_answer_while_a_job_is_submitted(user: User) -> None:
    """Nobody knows whether it has taken the job; exactly one runs once it goes on, and it is found."""
    freeze = f"kill -STOP {user.slurm._running('slurmctld')}"
    user.command_first_on_path(
        "sbatch", f'case "$*" in *--test-only*) ;; *) {freeze} ;; esac\nexec "$REAL" "$@"\n'
    )
    said = user("submit", "--cluster", "slurm", user.script(GUEST), code=1, timeout=180).stderr
    assert "nobody knows whether Slurm has taken the job" in said
    assert "do not submit it again" in said
    job_id = the_only_record(user)
    user.slurm.thaw_controller()
    user.wait_for("up0")
    ask_anew(user)
    assert user.wait_for_state(job_id, "RUNNING")["backend_id"] in (None, user.slurm_id(job_id))
    comments = user.slurm.run("squeue", "--noheader", "--states=all", "--format=%k").stdout.split()
    assert comments.count(f"clusterjob:{job_id}") == 1
    user.path("leave").touch()
    assert user("wait", job_id).returncode == 0


@pytest.mark.slow
def test_a_job_that_is_cancelled_while_nobody_knows_where_it_is_does_not_run(user: User) -> None:
    freeze = f"kill -STOP {user.slurm._running('slurmctld')}"
    user.command_first_on_path(
        "sbatch", f'case "$*" in *--test-only*) ;; *) {freeze} ;; esac\nexec "$REAL" "$@"\n'
    )
    user("submit", "--cluster", "slurm", user.script(SLEEPER), code=1, timeout=180)
    job_id = the_only_record(user)
    user("cancel", job_id)
    user.slurm.thaw_controller()
    wait_until(
        lambda: (
            job_id in user.slurm.run("squeue", "--noheader", "--states=all", "--format=%k").stdout
        ),
        PATIENCE,
    )
    ask_anew(user)
    user.wait_for_state(job_id, "CANCELLED")
    assert not user.path("up0").exists()
    nothing_left(PROMPT)


def test_an_id_that_was_given_to_another_job_is_not_taken_for_ours(user: User) -> None:
    job_id = user.submit(SLEEPER, "--set", "hold=true")
    other = user.slurm.submit(
        "--hold", "--output=/dev/null", "--comment=clusterjob:other", script="sleep 1000"
    )
    data = json.loads(record_of(user, job_id).read_text())["handle"]
    user.slurm.run("scancel", data["id"])
    change(
        record_of(user, job_id),
        handle=data | {"id": str(other), "data": data["data"] | {"at": time.time() - 100}},
    )
    ask_anew(user)
    ended = user.job(job_id)
    assert (ended["state"], "Slurm does not know it any more" in ended["reason"]) == ("LOST", True)
    assert "had ended already" in user("cancel", job_id).stderr
    assert user.slurm.job(other)["JobState"] == "PENDING"


@pytest.mark.slow
def test_ends_of_jobs_that_slurm_has_forgotten(user_of_either: User) -> None:
    """What the directory says comes first; of what it does not say accounting knows, where there is
    one.
    """
    user = user_of_either
    with user.slurm.configured(MinJobAge=2):
        good = user.submit("print('good')")
        bad = user.submit("import sys; sys.exit(4)", "--launcher", "srun")
        cancelled = user.submit(SLEEPER, "--set", "hold=true")
        again = user.submit("import time\ntime.sleep(1)", "--set", "hold=true")
        ids = {job_id: user.slurm_id(job_id) for job_id in (good, bad, cancelled, again)}
        user.slurm.run("scancel", ids[cancelled])
        user.slurm.wait_for_job(ids[good], "COMPLETED")
        user.slurm.run(
            "scontrol", "update", f"JobId={ids[again]}", "Comment=another"
        )  # as if it were another's
        user.slurm.run("scancel", ids[again])

        def forgotten() -> bool:
            return not user.slurm.run("squeue", "--noheader", "--states=all").stdout.strip()

        wait_until(forgotten, FORGETTING, "slurmctld to forget")
        if user.slurm.accounting:
            sacct = (
                "sacct",
                "--noheader",
                "--parsable2",
                "--allocations",
                "--format=State",
                f"--jobs={ids[cancelled]},{ids[again]}",
            )

            def accounted() -> bool:
                states = user.slurm.run(*sacct, check=False).stdout.split("\n")[:-1]
                return len(states) == 2 and all(state.startswith("CANCELLED") for state in states)

            wait_until(accounted, FORGETTING, "the rows, which come in stages")
        ask_anew(user)
        for job_id in ids:
            change(record_of(user, job_id), end=None)
            data = json.loads(record_of(user, job_id).read_text())["handle"]
            change(
                record_of(user, job_id),
                handle=data | {"data": data["data"] | {"at": data["data"]["at"] - 5}},
            )
        found = {job["id"]: job for job in user.jobs()}
        assert [found[job_id]["state"] for job_id in (good, bad)] == ["SUCCEEDED", "FAILED"]
        assert found[bad]["failure"]["exit_code"] == 4
        if user.slurm.accounting:
            assert [found[job_id]["state"] for job_id in (cancelled, again)] == [
                "CANCELLED",
                "CANCELLED",
            ]
        else:
            assert [found[job_id]["state"] for job_id in (cancelled, again)] == ["LOST"] * 2
            assert "it left no verdict" in found[cancelled]["reason"]


def test_a_federation_s_name_of_the_cluster_goes_with_the_id(user_accounted: User) -> None:
    """`sbatch --clusters` prints ``id;cluster``."""
    user = user_accounted
    job_id = user.submit(GUEST, "--set", "clusters=test")
    handle = json.loads(record_of(user, job_id).read_text())["handle"]
    assert (handle["id"].isdigit(), handle["data"]["cluster"]) == (True, "test")
    user.wait_for("up0")
    assert user.wait_for_state(job_id, "RUNNING")["backend_id"] == handle["id"]
    user("cancel", job_id)
    assert user.wait_for_state(job_id, "CANCELLED")["exit_code"] == 143
