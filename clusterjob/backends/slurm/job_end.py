"""Find the verdict of a Slurm job, first from its directory, then from Slurm's state.

A job without any sign of its end never counts as successful.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterjob.backends.slurm.squeue import JobRow
from clusterjob.core import arrays
from clusterjob.errors import SpecError
from clusterjob.node.logs import ends, failure_texts
from clusterjob.node.logs.events import now
from clusterjob.node.logs.job_dir import ALIVE, LOGS, SLURM_LOG
from clusterjob.node.logs.log_files import last_lines, node_directory, rank_files
from clusterjob.node.system.processes import signal_name
from clusterjob.node.verdict import (
    CANCELLED_EXIT_CODE,
    PREEMPTED_EXIT_CODE,
    TIMEOUT_EXIT_CODE,
    Failure,
    JobState,
    Verdict,
)

LEASE = 60.0  # seconds without a heartbeat from the batch script, which sends one every 10 s
_OOM_EXIT_CODE = 137
_TASKS_ENDED = re.compile(
    r"^srun: error: (?P<host>[^\s:]+): tasks? (?P<ranks>[\d,-]+): (?P<how>.+)$", re.MULTILINE
)
_MAX_TASKS = 4096  # maximum number of tasks to read from the output of srun
_LOST = ("NODE_FAIL", "BOOT_FAIL", "REVOKED")


def verdict_of(job_dir: Path) -> Verdict | None:
    """Return the newest verdict of the agents, or None."""
    return ends.read_result(job_dir)


def settled(verdict: Verdict, job_dir: Path) -> bool:
    """Return whether a verdict of the agents is final without Slurm's state.

    The cause of a SIGTERM may be scancel, the time limit, or a preemption with a requeue: only
    Slurm's state shows the cause. The signal reaches all processes of the step at once, so it may
    end a worker before the worker's agent has handled it.
    """
    if verdict.state is JobState.FAILED:
        return not _by_the_way(verdict, job_dir)
    return verdict.state is JobState.SUCCEEDED or (
        verdict.state is JobState.CANCELLED and ends.cancelled(job_dir)
    )


def _by_the_way(verdict: Verdict, job_dir: Path) -> bool:
    """Return whether a failure may be only a side effect of a cancel or SIGTERM.

    The failure may be a worker's reaction to SIGTERM, or a node whose agent had not started to
    listen.
    """
    return (
        ends.cancelled(job_dir)
        or by_a_node(verdict)
        or (verdict.failure is not None and verdict.failure.signal == "SIGTERM")
    )


def by_a_node(verdict: Verdict) -> bool:
    """Return whether the failure is that of a node, not of one worker.

    Either the node failed, or Slurm ended its shell in the setup lines.
    """
    return verdict.failure is not None and verdict.failure.rank is None


def explains(row: JobRow) -> bool:
    """Return whether Slurm's state shows why the job ended.

    If it does, failures of single nodes may be consequences of that.
    """
    return row.state in ("CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "PREEMPTED", *_LOST)


def step_code(job_dir: Path) -> int | None:
    """Return srun's exit code of the newest attempt; None if the batch script wrote none."""
    found = {}
    for path in ends.directory(job_dir).glob("srun.*"):
        number = path.suffix[1:]
        try:
            text = path.read_bytes().strip()
        except OSError:  # the file was deleted after the directory was listed
            continue
        if (
            number.isascii()
            and number.isdigit()
            and text.isdigit()
            and len(number) < 10
            and len(text) < 10
        ):
            found[int(number)] = int(text)
    return found[max(found)] if found else None


def of_step(job_dir: Path, code: int, started_at: str | None) -> Verdict:
    """Return the verdict of a job with --launcher srun: srun's exit code and the failed task."""
    common: dict[str, Any] = {"started_at": started_at, "ended_at": now()}
    if code == 0:
        return Verdict(JobState.SUCCEEDED, 0, **common)
    failures = _failed_tasks(job_dir, code)
    if not failures:
        return Verdict(JobState.FAILED, code, reason=f"srun ended with exit code {code}", **common)

    # srun returns the highest code of all tasks. The root cause is the first task whose last lines
    # do more than report a lost peer. A task that ended before srun began to kill is preferred.
    def rank_of(failure: Failure) -> tuple[bool, bool]:
        by_text = failure_texts.is_effect(failure_texts.meanings(failure.last_lines))
        return by_text, failure.effect

    root = min(failures, key=rank_of)
    others = tuple(replace(failure, last_lines=()) for failure in failures if failure is not root)
    return Verdict(
        JobState.FAILED,
        root.exit_code,
        reason=f"{root.who}: {root.message}",
        failure=root,
        consequences=others,
        **common,
    )


def alive(job_dir: Path, now_: float) -> bool:
    """Return whether the batch script's last heartbeat is within the job's lease.

    Args:
        job_dir: the job's directory.
        now_: seconds since the epoch.
    """
    try:
        return now_ - (ends.directory(job_dir) / ALIVE).stat().st_mtime < LEASE
    except OSError:
        return False


def _failed_tasks(job_dir: Path, code: int) -> list[Failure]:
    """Return the failed tasks in srun's output, in the order of the output."""
    found: list[Failure] = []
    for path in sorted((job_dir / LOGS).glob("slurm*.out")):
        ended_by_srun = False
        for line in last_lines(path, 10_000, limit=1 << 20):
            ended_by_srun |= "Terminating StepId" in line or "Force Terminated" in line
            match = _TASKS_ENDED.fullmatch(line)
            if match is not None:
                try:
                    ranks = arrays.indices(match["ranks"], line)[: _MAX_TASKS - len(found)]
                except (SpecError, ValueError):
                    continue  # this text is not a list of ranks from srun
                found += [
                    _task(
                        job_dir,
                        rank,
                        host=match["host"],
                        how=match["how"],
                        code=code,
                        ended_by_srun=ended_by_srun,
                    )
                    for rank in ranks
                ]
    return found


def _task(
    job_dir: Path, rank: int, host: str, how: str, code: int, *, ended_by_srun: bool
) -> Failure:
    exited = re.fullmatch(r"Exited with exit code (\d{1,3})", how, re.ASCII)
    signal = next((name for text, name in _SIGNALS if how.startswith(text)), None)
    own = min(int(exited[1]), 255) if exited else _SIGNAL_CODES.get(signal or "", code)
    node_rank, local_rank, lines = _rank_lines(job_dir, rank)
    meanings = failure_texts.meanings(lines)
    stopped = ended_by_srun and signal in ("SIGKILL", "SIGTERM")
    message = f"killed by {signal}" if signal else f"exited with code {own}" if exited else how
    exception = failure_texts.last_exception(lines)
    if exception is not None and exited:
        message = f"{exception} ({message})"
    return Failure(
        rank,
        local_rank,
        node_rank=node_rank,
        host=host,
        exit_code=own,
        signal=signal,
        message=message,
        last_lines=lines,
        effect=stopped or failure_texts.is_effect(meanings),
        kind=failure_texts.kind_of_end(None, meanings, signal, raised=exception is not None),
    )


_SIGNALS = (
    ("Killed", "SIGKILL"),
    ("Terminated", "SIGTERM"),
    ("Segmentation fault", "SIGSEGV"),
    ("Aborted", "SIGABRT"),
    ("Bus error", "SIGBUS"),
)
_SIGNAL_CODES = {"SIGKILL": 137, "SIGTERM": 143, "SIGSEGV": 139, "SIGABRT": 134, "SIGBUS": 135}


def _rank_lines(job_dir: Path, rank: int) -> tuple[int, int | None, tuple[str, ...]]:
    """Return a rank's node, local rank and last stderr lines, found by its log file."""
    for folder in sorted((job_dir / LOGS).glob("node*")):
        number = folder.name.removeprefix("node")
        err = (
            rank_files(node_directory(job_dir, int(number)), rank, restart=0)[1]
            if number.isdigit()
            else folder
        )
        if err.is_file():
            beside = [path.stem.removeprefix("rank") for path in folder.glob("rank*.err")]
            return (
                int(number),
                sum(other.isdigit() and int(other) < rank for other in beside),
                last_lines(err),
            )
    return 0, None, ()


def of_slurm(row: JobRow, own: Verdict | None, job_dir: Path, started_at: str | None) -> Verdict:
    """Return the verdict of a job from Slurm's final state and the agents' verdict (or None)."""
    code = step_code(job_dir)
    common: dict[str, Any] = {"started_at": started_at, "ended_at": now()}
    why = f" ({row.reason})" if row.reason and row.reason != row.state else ""
    if row.state == "TIMEOUT":
        return Verdict(
            JobState.FAILED,
            TIMEOUT_EXIT_CODE,
            reason="the time limit was reached: Slurm ended the job",
            **common,
        )
    if row.state == "OUT_OF_MEMORY":
        return Verdict(
            JobState.FAILED,
            _OOM_EXIT_CODE,
            reason="the job ran out of its requested memory: Slurm ended it",
            **common,
        )
    if row.state in _LOST:
        which = f": {row.failed_node}" if row.failed_node else ""
        return Verdict(
            JobState.LOST,
            1,
            reason=f"Slurm reports {row.state}: a node of the job failed{which}",
            **common,
        )
    if row.state == "PREEMPTED":
        return Verdict(
            JobState.PREEMPTED,
            PREEMPTED_EXIT_CODE,
            reason="Slurm preempted the job and did not queue it again",
            **common,
        )
    if (
        row.state == "CANCELLED"
        and own is not None
        and own.state in (JobState.FAILED, JobState.LOST)
        and _by_the_way(own, job_dir)
    ):
        reason = "cancelled" if ends.cancelled(job_dir) else f"Slurm reports CANCELLED{why}"
        return replace(
            own,
            state=JobState.CANCELLED,
            exit_code=CANCELLED_EXIT_CODE,
            reason=reason,
            failure=None,
            consequences=(),
        )
    by_sigterm = own is None or own.state is JobState.CANCELLED or _by_the_way(own, job_dir)
    if (
        row.state == "FAILED"
        and row.signal
        and code is None
        and by_sigterm
        and not ends.cancelled(job_dir)
    ):
        # The batch shell could not write srun's exit code. Slurm then ends the step with a SIGTERM
        # that does not mean a cancel.
        killed = (
            f"the job's batch shell was killed by {signal_name(row.signal)}:"
            f" Slurm reports FAILED{why}"
        )
        return Verdict(JobState.FAILED, 128 + row.signal, reason=killed, **common)
    # Agents report the SIGTERM of a cancel as a preemption.
    if own is not None and not (own.state is JobState.PREEMPTED and row.state == "CANCELLED"):
        return own
    if row.state == "CANCELLED":
        return Verdict(
            JobState.CANCELLED,
            CANCELLED_EXIT_CODE,
            reason=f"Slurm reports CANCELLED{why}",
            **common,
        )
    if row.state == "COMPLETED":
        return Verdict(
            JobState.LOST,
            1,
            reason="Slurm reports COMPLETED, but the job's directory has no result:"
            " is the disk full?",
            **common,
        )
    lines = last_lines(job_dir / LOGS / SLURM_LOG, 3)
    output = f": {'; '.join(lines)}" if lines else ""
    return Verdict(
        JobState.FAILED, code or 1, reason=f"Slurm reports {row.state}{why}{output}", **common
    )
