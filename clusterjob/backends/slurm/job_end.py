"""Find the verdict of a Slurm job, first from its directory, then from Slurm's state.

A job without any sign of its end never counts as successful.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterjob.backends.slurm.squeue import JobRow, is_number
from clusterjob.core import arrays
from clusterjob.errors import SpecError
from clusterjob.node.logs import ends, failure_texts
from clusterjob.node.logs.events import now, read_job_events
from clusterjob.node.logs.job_dir import ALIVE, LOGS, SLURM_LOG
from clusterjob.node.logs.log_files import last_lines, rank_files
from clusterjob.node.system.processes import signal_name
from clusterjob.node.system.sanitize import sanitize
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
# Slurm's states that alone decide the verdict: state, exit code, reason.
_BY_SLURM = {
    "TIMEOUT": (
        JobState.FAILED,
        TIMEOUT_EXIT_CODE,
        "the time limit was reached: Slurm ended the job",
    ),
    "OUT_OF_MEMORY": (
        JobState.FAILED,
        _OOM_EXIT_CODE,
        "the job ran out of its requested memory: Slurm ended it",
    ),
    "PREEMPTED": (
        JobState.PREEMPTED,
        PREEMPTED_EXIT_CODE,
        "Slurm preempted the job and did not queue it again",
    ),
}


def verdict_of(job_dir: Path) -> Verdict | None:
    """Return the newest verdict of the agents, or None."""
    return ends.read_result(job_dir)


def settled(verdict: Verdict, job_dir: Path) -> bool:
    """Return whether a verdict of the agents is final without Slurm's state.

    Only Slurm's state shows the cause of a SIGTERM: scancel, the time limit, or a preemption with a
    requeue. The signal reaches all processes of the step at once: it may end a worker before the
    worker's agent has handled the signal.
    """
    if verdict.state is JobState.FAILED:
        return not _is_side_effect(verdict, job_dir)
    return verdict.state is JobState.SUCCEEDED or (
        verdict.state is JobState.CANCELLED and ends.cancelled(job_dir)
    )


def _is_side_effect(verdict: Verdict, job_dir: Path) -> bool:
    """Return whether a failure may be only a side effect of a cancel or of a SIGTERM.

    A worker may react to SIGTERM by a failure, and a node fails if its agent had not started.
    """
    return (
        ends.cancelled(job_dir)
        or by_a_node(verdict)
        or (verdict.failure is not None and verdict.failure.signal == "SIGTERM")
    )


def by_a_node(verdict: Verdict) -> bool:
    """Return whether a node failed, not one of its workers.

    A node also fails if Slurm ends its shell in the setup lines.
    """
    return verdict.failure is not None and verdict.failure.rank is None


def explains(row: JobRow) -> bool:
    """Return whether Slurm's state, not a node's failure, shows why the job ended."""
    return row.state in ("CANCELLED", *_BY_SLURM, *_LOST)


def step_code(job_dir: Path) -> int | None:
    """Return srun's exit code of the newest attempt; None if the batch script wrote none."""
    found = {}
    for path in ends.directory(job_dir).glob("srun.*"):
        with contextlib.suppress(OSError):  # the file was deleted after the directory was listed
            attempt, code = path.suffix[1:], path.read_text(errors="replace").strip()
            if is_number(attempt) and is_number(code):
                found[int(attempt)] = int(code)
    return found[max(found)] if found else None


def of_step(job_dir: Path, code: int, started_at: str | None) -> Verdict:
    """Return the verdict of a job with --launcher srun: srun's exit code and the failed task."""
    common: dict[str, Any] = {"started_at": started_at, "ended_at": now()}
    if code == 0:
        return Verdict(JobState.SUCCEEDED, 0, **common)
    if not (failures := _failed_tasks(job_dir, code)):
        return Verdict(JobState.FAILED, code, reason=f"srun ended with exit code {code}", **common)
    # srun returns the highest code of all tasks. The root cause is the first task whose last lines
    # do more than report a lost peer. A task that ended before srun began to kill is preferred.
    root = min(
        failures,
        key=lambda failure: (
            failure_texts.is_effect(failure_texts.meanings(failure.last_lines)),
            failure.effect,
        ),
    )
    return Verdict(
        JobState.FAILED,
        root.exit_code,
        reason=f"{root.who}: {root.message}",
        failure=root,
        consequences=tuple(
            replace(failure, last_lines=()) for failure in failures if failure is not root
        ),
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
            if (match := _TASKS_ENDED.fullmatch(line)) is None:
                continue
            with contextlib.suppress(SpecError, ValueError):  # not a list of ranks from srun
                found += [
                    _task(
                        job_dir,
                        rank,
                        host=match["host"],
                        how=match["how"],
                        code=code,
                        ended_by_srun=ended_by_srun,
                    )
                    for rank in arrays.indices(match["ranks"], line)[: _MAX_TASKS - len(found)]
                ]
    return found


def _task(
    job_dir: Path, rank: int, host: str, how: str, code: int, *, ended_by_srun: bool
) -> Failure:
    exited = re.fullmatch(r"Exited with exit code (\d{1,3})", how, re.ASCII)
    signal = next((name for text, name in _SIGNALS if how.startswith(text)), None)
    own = min(int(exited[1]), 255) if exited else _SIGNAL_CODES.get(signal or "", code)
    node_rank, local_rank, lines = _rank_lines(job_dir, rank)
    meanings = failure_texts.meanings_of_end("", lines)
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
        effect=(ended_by_srun and signal in ("SIGKILL", "SIGTERM"))
        or failure_texts.is_effect(meanings),
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
        err = rank_files(folder, rank, restart=0)[1]
        if number.isdigit() and err.is_file():
            ranks = [path.stem.removeprefix("rank") for path in folder.glob("rank*.err")]
            return (
                int(number),
                sum(other.isdigit() and int(other) < rank for other in ranks),
                last_lines(err),
            )
    return 0, None, ()


def of_slurm(row: JobRow, own: Verdict | None, job_dir: Path, started_at: str | None) -> Verdict:
    """Return the verdict of a job from Slurm's final state and the agents' verdict (or None)."""
    code = step_code(job_dir)
    reported = f"Slurm reports {row.state}"

    def verdict(state: JobState, exit_code: int, reason: str) -> Verdict:
        return Verdict(state, exit_code, reason=reason, started_at=started_at, ended_at=now())

    if row.state in _BY_SLURM:
        return verdict(*_BY_SLURM[row.state])
    if row.state in _LOST:
        which = f": {row.failed_node}" if row.failed_node else ""
        if not row.failed_node.startswith("node "):  # Slurm does not know which one
            events = read_job_events(job_dir)
            lost = {str(each.get("host")) for each in events if each.get("event") == "lost"}
            which += f"; its agents lost {sanitize(', '.join(sorted(lost))[:200])}" if lost else ""
        return verdict(JobState.LOST, 1, f"{reported}: a node of the job failed{which}")
    if row.reason and row.reason != row.state:
        reported += f" ({row.reason})"
    if (
        row.state == "CANCELLED"
        and own is not None
        and own.state in (JobState.FAILED, JobState.LOST)
        and _is_side_effect(own, job_dir)
    ):
        return replace(
            own,
            state=JobState.CANCELLED,
            exit_code=CANCELLED_EXIT_CODE,
            reason="cancelled" if ends.cancelled(job_dir) else reported,
            failure=None,
            consequences=(),
        )
    if (
        row.state == "FAILED"
        and row.signal
        and code is None
        and (own is None or own.state is JobState.CANCELLED or _is_side_effect(own, job_dir))
        and not ends.cancelled(job_dir)
    ):
        # The batch shell could not write srun's exit code. Slurm then ends the step with SIGTERM,
        # which agents report as a cancel.
        name = signal_name(row.signal)
        return verdict(
            JobState.FAILED,
            128 + row.signal,
            f"the job's batch shell was killed by {name}: {reported}",
        )
    # Agents report the SIGTERM of a cancel as a preemption.
    if own is not None and not (own.state is JobState.PREEMPTED and row.state == "CANCELLED"):
        return own
    if row.state == "CANCELLED":
        return verdict(JobState.CANCELLED, CANCELLED_EXIT_CODE, reported)
    if row.state == "COMPLETED":
        return verdict(
            JobState.LOST,
            1,
            "Slurm reports COMPLETED, but the job's directory has no result: is the disk full?",
        )
    output = "; ".join(last_lines(job_dir / LOGS / SLURM_LOG, 3))
    return verdict(JobState.FAILED, code or 1, f"{reported}: {output}" if output else reported)
