"""Verdict of a Slurm job, from its directory and from recorded texts of Slurm 22.05."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from launching import write_tree

from clusterjob.backends.slurm import job_end, scancel
from clusterjob.backends.slurm.squeue import JobRow
from clusterjob.core.records import Record
from clusterjob.node.logs import ends
from clusterjob.node.logs.events import EventLog
from clusterjob.node.verdict import Failure, JobState, Verdict

# Output of srun --kill-on-bad-exit=1 for jobs of 2 x 2 tasks: in one, rank 3 raised; in the other,
# rank 1 got a SIGKILL.
RAISED = """\
srun: error: n4: task 3: Exited with exit code 1
srun: Terminating StepId=7.0
slurmstepd: error: *** STEP 7.0 ON n3 CANCELLED AT 2026-11-20T09:23:35 ***
srun: error: n3: tasks 0-1: Terminated
srun: error: n4: task 2: Terminated
"""
KILLED = """\
srun: error: n2: task 1: Killed
srun: Terminating StepId=9.0
slurmstepd: error: *** STEP 9.0 ON n1 CANCELLED AT 2026-11-20T09:23:44 ***
srun: error: n1: task 0: Terminated
srun: Force Terminated StepId=9.0
"""
PEER_LOSS = (
    "Traceback (most recent call last):\nRuntimeError: Connection closed by peer [127.0.0.1]:1234"
)


@pytest.fixture
def job_dir(tmp_path: Path) -> Path:
    for folder in ("ends", "logs/node0", "logs/node1"):
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path


def verdict(state: JobState = JobState.FAILED, signal: str | None = None) -> Verdict:
    code = 143 if signal else 1
    return Verdict(
        state,
        code,
        reason="said by the agents",
        failure=Failure(
            3,
            1,
            node_rank=1,
            host="n2",
            exit_code=code,
            signal=signal,
            message="killed" if signal else "boom",
        ),
    )


# What an agent reports after Slurm has ended another node's shell in its setup lines.
NODE_FAILED = Verdict(
    JobState.FAILED,
    143,
    reason="a setup line failed",
    failure=Failure(
        None,
        None,
        node_rank=1,
        host="n2",
        exit_code=143,
        signal=None,
        message="a setup line failed",
    ),
)


def end_from_srun(
    job_dir: Path, text: str, code: int, stderr_texts: dict[int, str] | None = None
) -> Verdict:
    (job_dir / "logs" / "slurm.out").write_text(text)
    for rank in range(4):
        (job_dir / "logs" / f"node{rank // 2}" / f"rank{rank}.err").write_text(
            (stderr_texts or {}).get(rank, "")
        )
    return job_end.of_step(job_dir, code, started_at="2026-01-01T00:00:00Z")


def test_task_that_failed_before_srun_stopped_others_is_root_cause(job_dir: Path) -> None:
    traceback = "Traceback (most recent call last):\n  File x\nValueError: boom\n"
    ended = end_from_srun(job_dir, RAISED, 143, {3: traceback})
    assert (
        ended.reason
        == "rank 3 (node 1, local rank 1, host n4): ValueError: boom (exited with code 1)"
    )
    assert ended.failure.last_lines[-1] == "ValueError: boom"
    others = sorted((each.rank, each.host, each.signal) for each in ended.consequences)
    assert others == [(0, "n3", "SIGTERM"), (1, "n3", "SIGTERM"), (2, "n4", "SIGTERM")]


EXITED = """\
srun: error: n1: task 0: Exited with exit code 1
srun: error: n2: tasks 2-3: Exited with exit code 5
"""


@pytest.mark.parametrize(
    ("text", "stderr_texts", "failed"),
    [
        (RAISED, {}, (3, "n4", 1, None)),
        (KILLED, {}, (1, "n2", 137, "SIGKILL")),
        (EXITED, {}, (0, "n1", 1, None)),
        (EXITED, {0: PEER_LOSS}, (2, "n2", 5, None)),
        (
            "srun: error: gpu-a07.lab: task 0: Segmentation fault (core dumped)",
            {},
            (0, "gpu-a07.lab", 139, "SIGSEGV"),
        ),
        ("srun: error: n[1-2]: tasks 0-3: Exited with exit code 2", {}, (0, "n[1-2]", 2, None)),
        ("srun: error: n1: tasks 1,3: Aborted (core dumped)", {}, (1, "n1", 134, "SIGABRT")),
        ("srun: error: n2: task 2: Out Of Memory", {}, (2, "n2", 9, None)),
        (
            "srun: error: n1: task 0: Exited with exit code 3",  # another line is of a worker
            {0: "srun: error: n9: task 9: Exited with exit code 99\n"},
            (0, "n1", 3, None),
        ),
    ],
)
def test_messages_of_srun_name_the_task_that_failed_first(
    job_dir: Path,
    text: str,
    stderr_texts: dict[int, str],
    failed: tuple[int, str, int, str | None],
) -> None:
    ended = end_from_srun(job_dir, text + "\n", 9, stderr_texts)
    assert ended.failure is not None
    found = ended.failure
    assert (found.rank, found.host, found.exit_code, found.signal) == failed
    assert (ended.state, ended.exit_code) == (JobState.FAILED, failed[2])


@pytest.mark.parametrize(("code", "state"), [(0, JobState.SUCCEEDED), (1, JobState.FAILED)])
def test_srun_output_that_names_no_task_gives_only_exit_code(
    job_dir: Path, code: int, state: JobState
) -> None:
    text = "srun: error: Unable to create step for job 5: Invalid generic resource (gres)\n"
    ended = end_from_srun(job_dir, text if code else "", code)
    assert (ended.state, ended.exit_code, ended.failure) == (state, code, None)


@pytest.mark.parametrize(
    ("files", "code"),
    [
        *(({"srun.0": content}, None) for content in ("", "x", "-1", "1 2", "²")),
        ({"srun.0": "75\n", "srun.9": "1\n", "srun.10": "0\n", "srun.11.part": "7\n"}, 0),
    ],
)
def test_exit_code_of_step_is_from_newest_attempt(
    job_dir: Path, files: dict[str, str], code: int | None
) -> None:
    write_tree(job_dir / "ends", **files)
    assert job_end.step_code(job_dir) == code


@pytest.mark.parametrize(
    ("found", "cancelled", "settled"),
    [
        (verdict(JobState.SUCCEEDED), False, True),
        (verdict(JobState.FAILED), False, True),
        (verdict(JobState.FAILED, "SIGKILL"), False, True),
        (verdict(JobState.FAILED, "SIGTERM"), False, False),
        (NODE_FAILED, False, False),
        (verdict(JobState.CANCELLED), False, False),
        (verdict(JobState.LOST), False, False),
        (verdict(JobState.CANCELLED), True, True),
        # The cancel or the failure may have come first.
        (verdict(JobState.FAILED), True, False),
    ],
)
def test_verdict_after_sigterm_is_final_only_with_slurm_state(
    job_dir: Path, found: Verdict, cancelled: bool, settled: bool
) -> None:
    """SIGTERM reaches every process of the step: a worker may end before its agent knows of it."""
    if cancelled:
        ends.cancel(job_dir)
    assert job_end.settled(found, job_dir) == settled


@pytest.mark.parametrize(
    ("row", "agent_verdict", "state", "code", "reason"),
    [
        (
            JobRow("7", "CANCELLED", reason="None"),
            verdict(JobState.FAILED, "SIGTERM"),
            JobState.CANCELLED,
            143,
            "Slurm reports CANCELLED",
        ),
        (
            JobRow("7", "FAILED", reason="NonZeroExitCode"),
            verdict(JobState.FAILED, "SIGTERM"),
            JobState.FAILED,
            143,
            "said by the agents",
        ),
        (
            JobRow("7", "CANCELLED"),
            verdict(JobState.FAILED),
            JobState.FAILED,
            1,
            "said by the agents",
        ),
        (JobRow("7", "CANCELLED"), NODE_FAILED, JobState.CANCELLED, 143, "Slurm reports CANCELLED"),
        (
            JobRow("7", "CANCELLED"),
            replace(NODE_FAILED, state=JobState.LOST),
            JobState.CANCELLED,
            143,
            "Slurm reports CANCELLED",
        ),
        (JobRow("7", "FAILED"), NODE_FAILED, JobState.FAILED, 143, "a setup line failed"),
        (
            JobRow("7", "TIMEOUT", reason="TimeLimit"),
            verdict(JobState.FAILED, "SIGTERM"),
            JobState.FAILED,
            124,
            "the time limit was reached",
        ),
        (
            JobRow("7", "TIMEOUT", reason="TimeLimit"),
            verdict(JobState.CANCELLED),
            JobState.FAILED,
            124,
            "the time limit was reached",
        ),
        (
            JobRow("7", "OUT_OF_MEMORY"),
            None,
            JobState.FAILED,
            137,
            "ran out of its requested memory",
        ),
        (JobRow("7", "NODE_FAIL"), verdict(JobState.LOST), JobState.LOST, 1, "NODE_FAIL"),
        (
            JobRow("7", "PREEMPTED"),
            verdict(JobState.CANCELLED),
            JobState.PREEMPTED,
            75,
            "preempted",
        ),
        (
            JobRow("7", "CANCELLED", reason="DependencyNeverSatisfied"),
            None,
            JobState.CANCELLED,
            143,
            "CANCELLED (DependencyNeverSatisfied)",
        ),
        (JobRow("7", "COMPLETED"), None, JobState.LOST, 1, "the job's directory has no result"),
        (
            JobRow("7", "FAILED", reason="NonZeroExitCode"),
            None,
            JobState.FAILED,
            1,
            "Slurm reports FAILED (NonZeroExitCode)",
        ),
        (JobRow("7", "SOMETHING_NEW"), None, JobState.FAILED, 1, "SOMETHING_NEW"),
    ],
)
def test_slurm_state_and_verdict_of_agents_give_end_of_job(
    job_dir: Path,
    row: JobRow,
    agent_verdict: Verdict | None,
    state: JobState,
    code: int,
    reason: str,
) -> None:
    ended = job_end.of_slurm(row, agent_verdict, job_dir=job_dir, started_at=None)
    assert (ended.state, ended.exit_code) == (state, code)
    assert reason in ended.reason
    if state is JobState.CANCELLED:
        assert ended.failure is None


def test_failure_after_cancel_request_is_cancelled(job_dir: Path) -> None:
    """A program may exit with any code when it is asked to stop."""
    ends.cancel(job_dir)
    ended = job_end.of_slurm(
        JobRow("7", "CANCELLED"), verdict(JobState.FAILED), job_dir=job_dir, started_at=None
    )
    assert (ended.state, ended.exit_code, ended.reason) == (JobState.CANCELLED, 143, "cancelled")
    assert job_end.of_slurm(
        JobRow("7", "FAILED"), verdict(JobState.FAILED), job_dir=job_dir, started_at=None
    ) == verdict(JobState.FAILED)


def test_last_output_of_batch_script_is_shown_when_nothing_else_is_known(job_dir: Path) -> None:
    (job_dir / "logs" / "slurm.out").write_text("slurmstepd: error: execve(): bash: No such file\n")
    ended = job_end.of_slurm(
        JobRow("7", "FAILED", reason="NonZeroExitCode"), None, job_dir=job_dir, started_at=None
    )
    assert ended.reason.endswith(": slurmstepd: error: execve(): bash: No such file")


def test_cancel_with_stacks_fetches_state_until_job_behind_login_host_has_ended(
    tmp_path: Path,
) -> None:
    record = Record("j-1", "j", "hpc", "slurm", tmp_path, 1, "2026-11-24T10:00:00Z", {})
    ends.want_stacks(tmp_path)
    fetched = []

    def refresh(records: Sequence[Record]) -> None:
        fetched.extend(records)
        if len(fetched) == 1:
            EventLog(tmp_path / "events.jsonl").add("started", world_size=1, restart=0)
        elif len(fetched) == 3:
            ends.write_result(tmp_path, Verdict(JobState.CANCELLED, 143))

    begin = time.monotonic()
    scancel.wait_for_stacks([record], refresh)
    assert fetched == [record] * 3
    assert time.monotonic() - begin < ends.REQUEST_SECONDS + ends.STACKS_SECONDS
