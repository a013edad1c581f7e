"""Jobs that give way on a real Slurm: warned, saved, queued again, and gone on as the same job."""

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
PATIENCE = 240.0

# Says at once that it is there, waits for the warning, and wants to go on; the next attempt has
# nothing left to do.
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


def weights(said: str) -> str:
    found = re.search(r"weights (\w+)", said)
    assert found, said
    return found[1]


def test_however_a_job_is_told_it_ends_with_the_weights_of_a_run_that_nobody_disturbed(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CLUSTERJOB_PYTHON")  # this one trains
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
        training = [str(TRAINING), "--checkpoint", str(user.path(f"{how}.pt")), "--steps", "400"]
        jobs[how] = user("submit", *common, "--name", how, *training).stdout.strip()
        wait_until(
            lambda how=how: "step 50" in user.output(jobs[how]),
            PATIENCE,
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
        user("wait", job, timeout=PATIENCE)
        said = user.output(job)
        assert ("attempt 1: from step" in said) == (how != "nobody"), said
        assert "attempt 1: from step 0" not in said
        assert "attempt 2" not in said
    assert len({weights(user.output(job)) for job in jobs.values()}) == 1


def test_the_time_limit_warns_and_the_job_is_queued_again(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm counts in minutes and may warn a minute early: a limit of two minutes leaves 10 to 70 s
    to be warned in.
    """
    monkeypatch.delenv("CLUSTERJOB_PYTHON")  # bootstrap needs torch
    job = user.submit(
        WAITING, "--nodes", "2", "--requeue", "--signal-before", "50s", "--time", "2m"
    )
    user("wait", job, timeout=PATIENCE)
    said = user.output(job).splitlines()
    for rank in (0, 1):
        own = [line.partition("] ")[2] for line in said if line.startswith((f"[{rank}]", "[0-1]"))]
        assert own == ["attempt 0", "warned", "attempt 1"], said
    assert user.job(job)["state"] == "SUCCEEDED"


@pytest.mark.parametrize("launcher", ["agent", "srun"])
def test_a_job_that_is_cancelled_is_not_queued_again(
    user: User, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CLUSTERJOB_PYTHON")
    job = user.submit(
        WAITING, "--nodes", "2", "--requeue", "--signal-before", "20s", "--launcher", launcher
    )
    wait_until(lambda: "attempt 0" in user.output(job), PATIENCE, "the workers")
    user.slurm.run("scancel", user.slurm_id(job))
    user("wait", job, code=143)
    assert user.job(job)["state"] == "CANCELLED"
    wait_until(lambda: user.slurm_job(job)["JobState"] == "CANCELLED", PATIENCE, "Slurm")
    time.sleep(2)
    assert user.slurm_job(job)["JobState"] == "CANCELLED"


def test_one_task_for_each_worker_is_warned_and_queued_again_too(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CLUSTERJOB_PYTHON")
    job = user.submit(
        WAITING,
        "--nproc-per-node",
        "2",
        "--requeue",
        "--signal-before",
        "20s",
        "--launcher",
        "srun",
    )
    wait_until(lambda: user.output(job).count("attempt 0") > 0, PATIENCE, "the workers")
    user.slurm.run("scancel", "--batch", "--signal=USR1", user.slurm_id(job))
    user("wait", job, timeout=PATIENCE)
    assert (
        user.directory_of(job) / "logs" / "node0" / "rank0.attempt1.out"
    ).read_text() == "attempt 1\n"


@pytest.mark.parametrize(
    ("launcher", "shape", "late"),
    [
        ("agent", ("--nodes", "2"), "$SLURM_NODEID"),
        ("srun", ("--nproc-per-node", "2"), "$SLURM_PROCID"),
    ],
)
def test_those_that_had_not_begun_are_queued_again_with_the_others(
    user: User, launcher: str, shape: tuple[str, ...], late: str
) -> None:
    """srun ends them when the first has left, and its own code is then theirs."""
    text = WAITING if launcher == "srun" else "pass"
    user.patch.delenv("CLUSTERJOB_PYTHON")
    hold = f'touch "held{late}"; [ "{late}" = 0 ] || [ "$CLUSTERJOB_ATTEMPT" != 0 ] || sleep 1000'
    job = user.submit(
        text, *shape, "--requeue", "--signal-before", "20s", "--launcher", launcher, "--setup", hold
    )
    user.wait_for("held1", timeout=PATIENCE)
    first = (
        (user.directory_of(job) / "events.jsonl").exists
        if launcher == "agent"
        else lambda: "attempt 0" in user.output(job)
    )
    wait_until(first, PATIENCE, "the first")
    user.slurm.run("scancel", "--batch", "--signal=USR1", user.slurm_id(job))
    user("wait", job, timeout=PATIENCE)
    assert user.job(job)["state"] == "SUCCEEDED"
    assert user.slurm_job(job)["Restarts"] == "1"


class Count:
    """Counts until it is told to leave, and goes on from there."""

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


def test_a_function_that_says_how_goes_on_in_the_next_attempt(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CLUSTERJOB_PYTHON")
    job = clusterjob.submit(
        Count(), 0, 10_000, nproc_per_node=2, cluster="slurm", requeue=True, signal_before="20s"
    )
    wait_until(lambda: "counting" in user.output(job.id), PATIENCE, "the function")
    user.slurm.run("scancel", "--signal=USR1", user.slurm_id(job.id))
    begin, end, attempt = job.result()
    assert (end, attempt) == (10_000, 1)
    assert 0 < begin < 10_000
    assert (user.directory_of(job.id) / "ends" / "result.attempt0.json").is_file()
