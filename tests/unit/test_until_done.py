"""--until-done: which attempts run again, and when two without progress end the job."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from launching import new_folder

from clusterjob.core.spec import JobSpec
from clusterjob.errors import SpecError
from clusterjob.node.logs import ends
from clusterjob.node.options import LaunchOptions
from clusterjob.node.program import Program
from clusterjob.node.rendezvous import policy
from clusterjob.node.rendezvous.policy import newest
from clusterjob.node.verdict import Failure, FailureKind, JobState, Verdict

PROGRAM = Program("script", "train.py")
STOPPED = Verdict(JobState.PREEMPTED, 75, reason="stopped at the limit", started_at="now")


def failed(kind: FailureKind, exit_code: int = 137) -> Verdict:
    failure = Failure(
        0, 0, node_rank=0, host="gpu1", exit_code=exit_code, signal=None, message="m", kind=kind
    )
    return Verdict(
        JobState.FAILED, exit_code, reason="rank 0: m", failure=failure, started_at="now"
    )


class Job:
    """A job whose attempts end one after another."""

    def __init__(self, directory: Path, **options: object) -> None:
        self.directory = directory
        self.saved = new_folder(directory / "out")
        ends.directory(directory).mkdir()
        self.options = LaunchOptions(
            PROGRAM, **{"until_done": True, "checkpoint_dir": str(self.saved), **options}
        )
        self.attempt, self.seconds = -1, 1.0

    def end(self, verdict: Verdict, *, save: str = "", warned: bool = False) -> Verdict:
        """Run an attempt that saves a file and ends with a verdict; return the decision."""
        self.attempt += 1
        begun = policy.begin_attempt(self.options, self.directory, self.attempt)
        begun.join()
        if save:
            path = self.saved / save
            path.parent.mkdir(exist_ok=True)
            path.touch()
            at = time.time_ns() + self.attempt  # the clock of a file system may be coarse
            os.utime(path, ns=(at, at))
        return policy.end_attempt(
            self.options, self.directory, verdict, begun, seconds=self.seconds, warned=warned
        )


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_job_without_until_done_keeps_verdict(tmp_path: Path) -> None:
    job = Job(tmp_path, until_done=False)
    assert job.end(STOPPED, warned=True) is STOPPED
    assert not (ends.directory(tmp_path) / "progress.json").exists()


@pytest.mark.parametrize("kind", FailureKind)
def test_only_failures_that_may_pass_start_another_attempt(job: Job, kind: FailureKind) -> None:
    ends_job = kind in {
        FailureKind.CODE, FailureKind.EXIT_CODE, FailureKind.IMPORT, FailureKind.LAUNCH,
        FailureKind.EARLY_EXIT, FailureKind.OOM_HOST, FailureKind.OOM_DEVICE,
    }  # fmt: skip
    verdict = job.end(failed(kind), save="step")
    assert verdict.state is (JobState.FAILED if ends_job else JobState.PREEMPTED)
    assert verdict.exit_code == (137 if ends_job else 75)
    assert verdict.failure is not None


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.CANCELLED, JobState.LOST])
def test_success_and_cancel_end_job(job: Job, state: JobState) -> None:
    verdict = Verdict(state, 0 if state is JobState.SUCCEEDED else 1)
    assert job.end(verdict, warned=True) is verdict


def test_two_attempts_in_a_row_without_newer_file_end_job(job: Job) -> None:
    assert job.end(STOPPED, save="a").state is JobState.PREEMPTED
    assert job.end(STOPPED).state is JobState.PREEMPTED
    assert job.end(STOPPED, save="below/b").state is JobState.PREEMPTED
    assert job.end(failed(FailureKind.SIGNAL)).state is JobState.PREEMPTED
    last = job.end(failed(FailureKind.NODE_LOST, exit_code=3))
    assert (last.state, last.exit_code) == (JobState.FAILED, 3)
    assert last.reason == (
        f"2 attempts in a row left nothing newer in {job.saved}; the last: rank 0: m"
    )


def test_removed_checkpoint_is_no_progress(job: Job) -> None:
    for name in ("a", "b"):
        (job.saved / name).touch()
    assert job.end(STOPPED).state is JobState.PREEMPTED
    (job.saved / "b").unlink()
    assert job.end(STOPPED).state is JobState.FAILED


def test_attempt_that_never_started_workers_does_not_count(job: Job) -> None:
    waiting = Verdict(JobState.PREEMPTED, 75, reason="before its workers had started")
    assert all(job.end(waiting).state is JobState.PREEMPTED for _ in range(4))


def test_missing_checkpoint_directory_is_no_progress(job: Job) -> None:
    job.saved.rmdir()
    assert job.end(STOPPED).state is JobState.PREEMPTED
    assert job.end(STOPPED).state is JobState.FAILED


def test_short_attempts_end_job_without_checkpoint_directory(tmp_path: Path) -> None:
    job = Job(tmp_path, checkpoint_dir="")
    assert job.end(STOPPED).state is JobState.PREEMPTED
    assert job.end(STOPPED).reason.startswith("2 attempts in a row ended within 60 s; the last: ")
    job.seconds = 60.0
    assert all(job.end(STOPPED).state is JobState.PREEMPTED for _ in range(4))


def test_each_end_after_warning_signal_starts_another_attempt(tmp_path: Path) -> None:
    job = Job(tmp_path, warn_signal="SIGUSR1")
    ended = Verdict(JobState.SUCCEEDED, 0, started_at="now")
    assert job.end(ended, save="a", warned=True).state is JobState.PREEMPTED
    assert job.end(failed(FailureKind.CODE), save="b", warned=True).state is JobState.PREEMPTED
    assert job.end(ended).state is JobState.SUCCEEDED


def test_second_coordinator_of_attempt_keeps_its_begin(job: Job) -> None:
    job.end(STOPPED, save="a")
    policy.begin_attempt(job.options, job.directory, 1).join()
    (job.saved / "b").touch()
    at = time.time_ns() + 10**9
    os.utime(job.saved / "b", ns=(at, at))
    job.attempt = 0  # `end` runs attempt 1 again
    for _ in range(2):
        assert job.end(STOPPED).state is JobState.PREEMPTED
        job.attempt = 0
    assert job.end(STOPPED).state is JobState.PREEMPTED


def test_search_for_newer_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loop").symlink_to(tmp_path)
    for number in range(10):
        (tmp_path / f"{number}").touch()
    assert newest(tmp_path)
    monkeypatch.setattr(policy, "_MAX_FILES", 5)
    assert newest(tmp_path) is None


def test_search_that_hangs_counts_as_progress(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.end(STOPPED, save="a")
    monkeypatch.setattr(policy, "_WALK_TIMEOUT", 0.05)
    real = policy.newest

    def slow(directory: Path) -> int | None:
        time.sleep(0.5)
        return real(directory)

    monkeypatch.setattr(policy, "newest", slow)
    assert all(job.end(STOPPED).state is JobState.PREEMPTED for _ in range(3))
    time.sleep(0.6)  # the threads end


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"checkpoint_dir": "out"}, "--checkpoint-dir belongs to --until-done"),
        ({"until_done": True, "launcher": "srun"}, "--until-done needs clusterjob's agent"),
        ({"warn_signal": "SIGUSR1"}, "no warning would be sent"),
        (
            {"until_done": True, "warn_signal": "SIGUSR1", "launcher": "ray"},
            "--launcher ray starts the workers",
        ),
    ],
)
def test_options_that_exclude_each_other_are_refused(
    tmp_path: Path, options: dict[str, object], error: str
) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(SpecError, match=error):
        JobSpec(PROGRAM, tmp_path, **options)  # type: ignore[arg-type]


def test_newer_log_is_no_progress(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert job.end(STOPPED, save="train.log").state is JobState.PREEMPTED
    assert job.end(STOPPED, save="events.out.tfevents.1.host").state is JobState.FAILED
