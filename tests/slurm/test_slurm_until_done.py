"""--until-done under a real Slurm: attempts, dependent jobs, the end of the chain, cancel."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest
from login_user import Laptop
from procs import wait_until
from slurm_user import User

pytestmark = pytest.mark.slow

TEST_TIMEOUT = 120.0
OPTIONS = ("--until-done", "--checkpoint-dir", "saved", "--signal-before", "4s", "--grace", "1")

# A script without clusterjob code. Each attempt saves one more step, then works on until it is
# stopped; the attempt that begins with step 2 is the last.
STEPS = """
    import pathlib, time
    saved = pathlib.Path("saved/step")
    saved.parent.mkdir(exist_ok=True)
    step = int(saved.read_text()) if saved.exists() else 0
    print("begins at step", step, flush=True)
    if step == 2:
        raise SystemExit
    saved.write_text(str(step + 1))
    print("saved", flush=True)
    time.sleep(1000)
    """


def attempts(user: User, job: str) -> int:
    """Return the number of attempts that have printed a line."""
    return len(re.findall("begins", user.output(job)))


def warn(user: User, job: str, attempt: int, text: str = "begins") -> None:
    """Warn the job as Slurm does before the time limit, once this attempt has printed a line."""
    wait_until(
        lambda: user.output(job).count(text) > attempt, TEST_TIMEOUT, f"attempt {attempt} of {job}"
    )
    user.slurm.run("scancel", "--batch", "--signal=USR1", newest(user, job))


def newest(user: User, job: str) -> str:
    """Return Slurm's id of the newest job in the chain."""
    found = sorted((user.directory_of(job) / "ends").glob("next.[0-9]"))
    return found[-1].read_text().strip() if found else user.slurm_id(job)


def newest_agent(user: User, job: str) -> int:
    """Return the process id of the newest agent of node 0."""
    events = (user.directory_of(job) / "events.jsonl").read_text().splitlines()
    return [event["pid"] for event in map(json.loads, events) if event["event"] == "joined"][-1]


def forbid_requeue(user: User, job: str) -> None:
    user.slurm.run("scontrol", "update", f"JobId={newest(user, job)}", "Requeue=0")


def in_queue(user: User) -> set[str]:
    return set(user.slurm.run("squeue", "--noheader", "--format=%i").stdout.split())


@pytest.mark.parametrize("how", ["requeue", "dependent jobs"])
def test_job_runs_again_until_script_is_done(user: User, how: str) -> None:
    job = user.submit(STEPS, *OPTIONS)
    ids = []
    for attempt in (0, 1):
        wait_until(lambda n=attempt: attempts(user, job) > n, TEST_TIMEOUT, f"attempt {attempt}")
        ids.append(newest(user, job))
        if how == "dependent jobs":
            forbid_requeue(user, job)
        if attempt == 1:
            assert user.job(job)["reason"] == "attempt 1"
        warn(user, job, attempt, text="saved")
        if attempt == 0 and how == "requeue":  # Slurm waits 10 s before a requeued job starts
            waiting = user.wait_for_state(job, "PENDING", timeout=TEST_TIMEOUT)
            assert waiting["reason"].startswith("waits for attempt 1 (attempt 0 was preempted: ")
    user("wait", job, timeout=TEST_TIMEOUT)
    assert user.job(job)["state"] == "SUCCEEDED"
    assert re.findall(r"begins at step \d", user.output(job)) == [
        f"begins at step {step}" for step in range(3)
    ]
    assert "begins at step 1" in user.output(job, "--attempt", "1")
    assert (newest(user, job) == ids[0]) == (how == "requeue")
    assert len({*ids, newest(user, job)}) == (1 if how == "requeue" else 3)
    verdicts = [
        json.loads((user.directory_of(job) / "ends" / f"result.attempt{n}.json").read_text())
        for n in (0, 1)
    ]
    assert [verdict["state"] for verdict in verdicts] == ["PREEMPTED", "PREEMPTED"]
    assert len(user.jobs()) == 1
    assert in_queue(user) == set()


def test_cancel_between_two_attempts_ends_chain(user: User) -> None:
    job = user.submit(STEPS, *OPTIONS, "--set", "nodelist=n1")
    wait_until(lambda: attempts(user, job) == 1, TEST_TIMEOUT, "the first attempt")
    forbid_requeue(user, job)
    user.slurm.run("scontrol", "update", "NodeName=n1", "State=drain", "Reason=test")
    try:
        warn(user, job, 0, text="saved")
        user.wait_for_state(job, "PENDING", timeout=TEST_TIMEOUT)
        user("cancel", job)
        user("wait", job, code=143, timeout=TEST_TIMEOUT)
    finally:
        user.slurm.run("scontrol", "update", "NodeName=n1", "State=resume")
    assert user.job(job)["state"] == "CANCELLED"
    wait_until(lambda: in_queue(user) == set(), TEST_TIMEOUT, "an empty queue")
    assert attempts(user, job) == 1


def test_cancel_while_next_job_is_submitted_ends_chain(user: User) -> None:
    """The job's sbatch blocks before and after the submission until the job is cancelled."""
    user.command_first_on_path(
        "sbatch",
        """
        case $* in *--dependency=afterany:*)
          touch submitting
          while [ ! -e submit ]; do sleep 0.1; done ;;
        esac
        exec "$REAL" "$@"
        """.replace("submitting", str(user.path("submitting"))).replace(
            "-e submit ", f"-e {user.path('submit')} "
        ),
    )
    job = user.submit(STEPS, *OPTIONS)
    wait_until(lambda: attempts(user, job) == 1, TEST_TIMEOUT, "the first attempt")
    forbid_requeue(user, job)
    warn(user, job, 0, text="saved")
    user.wait_for("submitting", timeout=TEST_TIMEOUT)
    user("cancel", job)
    user.path("submit").touch()
    user("wait", job, code=143, timeout=TEST_TIMEOUT)
    wait_until(lambda: in_queue(user) == set(), TEST_TIMEOUT, "an empty queue")
    assert attempts(user, job) == 1
    assert user.job(job)["state"] == "CANCELLED"


def test_job_says_if_it_cannot_be_queued_again(user: User) -> None:
    user.command_first_on_path(
        "sbatch",
        """
        case $* in *--dependency=afterany:*) echo "sbatch: not here" >&2; exit 1 ;; esac
        exec "$REAL" "$@"
        """,
    )
    job = user.submit(STEPS, *OPTIONS)
    wait_until(lambda: attempts(user, job) == 1, TEST_TIMEOUT, "the first attempt")
    forbid_requeue(user, job)
    warn(user, job, 0, text="saved")
    user("wait", job, code=75, timeout=TEST_TIMEOUT)
    log = (user.directory_of(job) / "logs" / "slurm.out").read_text()
    assert "neither scontrol requeue nor sbatch works here" in log


def test_job_of_login_host_continues_as_dependent_job(laptop: Laptop) -> None:
    job = laptop.submit(STEPS, *OPTIONS)
    for attempt in (0, 1):
        wait_until(lambda n=attempt: attempts(laptop, job) > n, TEST_TIMEOUT, f"attempt {attempt}")
        laptop.job(job)  # fetches the file with the id of the newest job
        forbid_requeue(laptop, job)
        warn(laptop, job, attempt, text="saved")
    laptop("wait", job, timeout=TEST_TIMEOUT)
    assert laptop.job(job)["state"] == "SUCCEEDED"
    assert attempts(laptop, job) == 3
    assert int(newest(laptop, job)) > int(laptop.slurm_id(job))


def test_job_continues_after_agent_of_node_0_was_killed(user: User) -> None:
    job = user.submit(STEPS, *OPTIONS)
    for attempt in (0, 1):
        wait_until(
            lambda n=attempt: user.output(job).count("begins") > n, TEST_TIMEOUT, f"{attempt}"
        )
        os.kill(newest_agent(user, job), signal.SIGKILL)
    user.wait_for_state(job, "FAILED", "LOST", timeout=TEST_TIMEOUT)
    assert attempts(user, job) == 2
    assert in_queue(user) == set()


def test_job_is_queued_again_after_an_outage_of_the_controller(user: User) -> None:
    job = user.submit(STEPS, *OPTIONS)
    wait_until(lambda: "saved" in user.output(job), TEST_TIMEOUT, "the first attempt")
    user.slurm.stop_controller()
    # The signal of scancel would go through the controller, which may stop before it passes it on.
    os.kill(newest_agent(user, job), signal.SIGUSR1)
    ended = user.directory_of(job) / "ends" / "srun.0"
    wait_until(ended.exists, TEST_TIMEOUT, "its end")
    user.slurm.start_controller()
    wait_until(lambda: attempts(user, job) == 2, TEST_TIMEOUT, "the second attempt")
    user("cancel", job)
    user("wait", job, code=143, timeout=TEST_TIMEOUT)
