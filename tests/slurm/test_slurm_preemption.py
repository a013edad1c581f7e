"""Preemption under a real Slurm: warning, checkpoint, requeue and next attempt of a job."""

from __future__ import annotations

import re
import time

import pytest
import submitit
from launching import ROOT
from procs import wait_until
from slurm_user import User

import clusterjob

pytestmark = pytest.mark.slow

TRAINING = ROOT / "examples" / "train_resume.py"
TEST_TIMEOUT = 240.0

# Prints its attempt, waits for the warning and requests a requeue; the next attempt ends at once.
WAITING = """
    import sys, time
    from clusterjob import bootstrap
    with bootstrap.init(process_group=False) as ctx:
        print("attempt", ctx.attempt, flush=True)
        begin = time.monotonic()
        while ctx.attempt == 0:
            if ctx.preempted:
                print("warned", flush=True)
                ctx.requeue()
            if time.monotonic() - begin > 200:
                sys.exit("never warned")
            time.sleep(0.05)
    """


def weights(output: str) -> str:
    found = re.search(r"weights (\w+)", output)
    assert found, output
    return found[1]


def test_preempted_jobs_end_with_same_weights_as_undisturbed_job(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CLUSTERJOB_PYTHON")  # training needs torch
    common = [
        "--cluster",
        "slurm",
        "--nodes",
        "2",
        "--nproc-per-node",
        "2",
        "--requeue",
        "--signal-before",
        "20s",
    ]
    jobs = {}
    for how in ("nobody", "signal", "batch", "requeue"):
        training = [str(TRAINING), "--checkpoint", str(user.path(f"saved-{how}")), "--steps", "400"]
        jobs[how] = user("submit", *common, "--name", how, *training).stdout.strip()
        wait_until(
            lambda how=how: "step 50" in user.output(jobs[how]),
            TEST_TIMEOUT,
            f"{how} saving its first checkpoint",
        )
        number = user.slurm_id(jobs[how])
        if how == "signal":
            user.slurm.run("scancel", "--signal=USR1", number)
        elif how == "batch":
            user.slurm.run("scancel", "--batch", "--signal=USR1", number)
        elif how == "requeue":
            user.slurm.run("scontrol", "requeue", number)
    for how, job in jobs.items():
        user("wait", job, timeout=TEST_TIMEOUT)
        output = user.output(job)
        assert ("attempt 1: from step" in output) == (how != "nobody"), output
        assert "attempt 1: from step 0" not in output
        assert "attempt 2" not in output
    assert len({weights(user.output(job)) for job in jobs.values()}) == 1


def test_job_near_time_limit_is_warned_and_requeued(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm counts in minutes and may warn a minute early.

    A limit of two minutes leaves 10 to 70 s for the warning.
    """
    monkeypatch.delenv("CLUSTERJOB_PYTHON")  # bootstrap needs torch
    job = user.submit(
        WAITING, "--nodes", "2", "--requeue", "--signal-before", "50s", "--time", "2m"
    )
    user("wait", job, timeout=TEST_TIMEOUT)
    output = user.output(job).splitlines()
    for rank in (0, 1):
        own = [
            line.partition("] ")[2] for line in output if line.startswith((f"[{rank}]", "[0-1]"))
        ]
        assert own == ["attempt 0", "warned", "attempt 1"], output
    assert user.job(job)["state"] == "SUCCEEDED"


@pytest.mark.parametrize("launcher", ["agent", "srun"])
def test_cancelled_job_is_not_requeued(
    user: User, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CLUSTERJOB_PYTHON")
    job = user.submit(
        WAITING, "--nodes", "2", "--requeue", "--signal-before", "20s", "--launcher", launcher
    )
    wait_until(lambda: "attempt 0" in user.output(job), TEST_TIMEOUT, "the workers")
    user.slurm.run("scancel", user.slurm_id(job))
    user("wait", job, code=143)
    assert user.job(job)["state"] == "CANCELLED"
    wait_until(lambda: user.slurm_job(job)["JobState"] == "CANCELLED", TEST_TIMEOUT, "Slurm")
    time.sleep(2)
    assert user.slurm_job(job)["JobState"] == "CANCELLED"


@pytest.mark.parametrize(
    ("launcher", "shape", "late"),
    [
        ("agent", ("--nodes", "2"), "$SLURM_NODEID"),
        ("srun", ("--nproc-per-node", "2"), "$SLURM_PROCID"),
    ],
)
def test_tasks_still_in_setup_are_requeued_with_started_tasks(
    user: User, launcher: str, shape: tuple[str, ...], late: str
) -> None:
    """When the first task exits, srun ends the tasks in setup and exits with their code."""
    text = WAITING if launcher == "srun" else "pass"
    user.patch.delenv("CLUSTERJOB_PYTHON")
    hold = f'touch "held{late}"; [ "{late}" = 0 ] || [ "$CLUSTERJOB_ATTEMPT" != 0 ] || sleep 1000'
    job = user.submit(
        text, *shape, "--requeue", "--signal-before", "20s", "--launcher", launcher, "--setup", hold
    )
    user.wait_for("held1", timeout=TEST_TIMEOUT)
    first = (
        (user.directory_of(job) / "events.jsonl").exists
        if launcher == "agent"
        else lambda: "attempt 0" in user.output(job)
    )
    wait_until(first, TEST_TIMEOUT, "the first")
    user.slurm.run("scancel", "--batch", "--signal=USR1", user.slurm_id(job))
    user("wait", job, timeout=TEST_TIMEOUT)
    assert user.job(job)["state"] == "SUCCEEDED"
    assert user.slurm_job(job)["Restarts"] == "1"
    if launcher == "srun":
        assert "attempt 1" in user.output(job).splitlines()[-1]


class Count:
    """Counts until preemption; the next attempt resumes from the count."""

    def __call__(self, begin: int, end: int) -> list[int]:
        from clusterjob import bootstrap

        context = bootstrap.init()
        self.reached = begin
        while self.reached < end:
            self.reached += 1
            if context.attempt == 0:
                print("counting", flush=True)
                time.sleep(0.05)
        return [begin, self.reached, context.attempt]

    def checkpoint(self, _begin: int, end: int) -> submitit.helpers.DelayedSubmission:
        return submitit.helpers.DelayedSubmission(Count(), self.reached, end)


def test_function_with_checkpoint_method_resumes_in_next_attempt(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CLUSTERJOB_PYTHON")
    job = clusterjob.submit(
        Count(), 0, 10_000, nproc_per_node=2, cluster="slurm", requeue=True, signal_before="20s"
    )
    wait_until(lambda: "counting" in user.output(job.id), TEST_TIMEOUT, "the function")
    user.slurm.run("scancel", "--signal=USR1", user.slurm_id(job.id))
    begin, end, attempt = job.result()
    assert (end, attempt) == (10_000, 1)
    assert 0 < begin < 10_000
    assert (user.directory_of(job.id) / "ends" / "result.attempt0.json").is_file()
