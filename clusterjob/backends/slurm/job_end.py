"""How a job of Slurm's ended: what its directory says comes first, then Slurm's own word. Absence
is never success.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterjob.backends.slurm.queue import Row
from clusterjob.core import arrays
from clusterjob.errors import SpecError
from clusterjob.node.logs import ends
from clusterjob.node.logs.events import now
from clusterjob.node.logs.log_files import last_lines, node_directory, rank_files
from clusterjob.node.system.processes import signal_name
from clusterjob.node.verdict import (
    CANCELLED_EXIT_CODE,
    PREEMPTED_EXIT_CODE,
    TIMEOUT_EXIT_CODE,
    Failure,
    JobState,
    Verdict,
    is_peer_loss,
    last_exception,
)

LEASE = 60.0  # seconds without a sign of life from the batch script, which gives one every 10 s
_OOM_EXIT_CODE = 137
_TASKS_ENDED = re.compile(
    r"^srun: error: (?P<host>[^\s:]+): tasks? (?P<ranks>[\d,-]+): (?P<how>.+)$", re.MULTILINE
)
_MOST_TASKS = 4096  # of which srun tells, that are looked at
_LOST = ("NODE_FAIL", "BOOT_FAIL", "REVOKED")


def verdict_of(job_dir: Path) -> Verdict | None:
    """Return the newest verdict that the agents wrote, or None."""
    return ends.read_result(job_dir)


def settled(verdict: Verdict, job_dir: Path) -> bool:
    """Return whether a verdict of the agents needs no word of Slurm's.

    A SIGTERM may be a scancel, the time limit or a preemption, after which the job is queued again:
    only Slurm knows. It goes to every process of the step at once, so a worker may have ended by it
    before its agent was told.
    """
    if verdict.state is JobState.FAILED:
        return not _by_the_way(verdict, job_dir)
    return verdict.state is JobState.SUCCEEDED or (
        verdict.state is JobState.CANCELLED and ends.cancelled(job_dir)
    )


def _by_the_way(verdict: Verdict, job_dir: Path) -> bool:
    """Return whether a failure may be nothing but how a worker took its SIGTERM, or a node whose
    agent had not begun to listen.
    """
    return (
        ends.cancelled(job_dir)
        or by_a_node(verdict)
        or (verdict.failure is not None and verdict.failure.signal == "SIGTERM")
    )


def by_a_node(verdict: Verdict) -> bool:
    """Return whether a node failed as a whole: by itself, or because Slurm ended its shell in the
    setup lines.
    """
    return verdict.failure is not None and verdict.failure.rank is None


def explains(row: Row) -> bool:
    """Return whether Slurm ended the job for a reason that it names: what single nodes have left
    behind may then follow from it.
    """
    return row.state in ("CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "PREEMPTED", *_LOST)


def step_code(job_dir: Path) -> int | None:
    """Return srun's exit code in the newest attempt, as the batch script wrote it; None when it did
    not.
    """
    found = {}
    for path in ends.directory(job_dir).glob("srun.*"):
        number = path.suffix[1:]
        try:
            text = path.read_bytes().strip()
        except OSError:  # gone since it was listed
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
    """Return the end of a job whose workers srun itself started: srun's code, and the task that it
    names first.
    """
    common: dict[str, Any] = {"started_at": started_at, "ended_at": now()}
    if code == 0:
        return Verdict(JobState.SUCCEEDED, 0, **common)
    failures = _failed_tasks(job_dir, code)
    if not failures:
        return Verdict(JobState.FAILED, code, reason=f"srun ended with exit code {code}", **common)
    # srun's own code is the highest of all tasks, guilty or not. Of those that it names the guilty
    # one is the first whose last words do not only say that another is gone, best one that had
    # ended before srun killed the rest.
    root = min(
        failures, key=lambda failure: (is_peer_loss("\n".join(failure.last_lines)), failure.effect)
    )
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
    """Return whether the batch script has given a sign of life within the job's lease.

    Args:
        job_dir: the job's directory.
        now_: seconds since the epoch.
    """
    try:
        return now_ - (ends.directory(job_dir) / "alive").stat().st_mtime < LEASE
    except OSError:
        return False


def _failed_tasks(job_dir: Path, code: int) -> list[Failure]:
    """Return the tasks that srun says have failed, in the order in which it says so."""
    found: list[Failure] = []
    for path in sorted((job_dir / "logs").glob("slurm*.out")):
        ended_by_srun = False
        for line in last_lines(path, 10_000, limit=1 << 20):
            ended_by_srun |= "Terminating StepId" in line or "Force Terminated" in line
            match = _TASKS_ENDED.fullmatch(line)
            if match is not None:
                try:
                    ranks = arrays.indices(match["ranks"], line)[: _MOST_TASKS - len(found)]
                except (SpecError, ValueError):
                    continue  # srun writes no such list
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
    effect = is_peer_loss("\n".join(lines)) or (ended_by_srun and signal in ("SIGKILL", "SIGTERM"))
    message = f"killed by {signal}" if signal else f"exited with code {own}" if exited else how
    exception = last_exception(lines)
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
        effect=effect,
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
    """Return a rank's node and its place there, as its log lies beside those of the others, and its
    last words.
    """
    for folder in sorted((job_dir / "logs").glob("node*")):
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


def of_slurm(row: Row, own: Verdict | None, job_dir: Path, started_at: str | None) -> Verdict:
    """Return the end of a job from Slurm's final state and, where the agents wrote one that leaves
    it open, from theirs.
    """
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
            reason="the job ran out of the memory that it asked for: Slurm ended it",
            **common,
        )
    if row.state in _LOST:
        which = f": {row.failed_node}" if row.failed_node else ""
        return Verdict(
            JobState.LOST,
            1,
            reason=f"Slurm says {row.state}: a node of the job failed{which}",
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
        reason = "cancelled" if ends.cancelled(job_dir) else f"Slurm says CANCELLED{why}"
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
        # The batch shell could not write how the step ended. Slurm then ends the step by SIGTERM,
        # which is no cancel.
        killed = (
            f"the job's batch shell was killed by {signal_name(row.signal)}: Slurm says FAILED{why}"
        )
        return Verdict(JobState.FAILED, 128 + row.signal, reason=killed, **common)
    if own is not None and not (
        own.state is JobState.PREEMPTED and row.state == "CANCELLED"
    ):  # which a SIGTERM looks like to agents
        return own
    if row.state == "CANCELLED":
        return Verdict(
            JobState.CANCELLED, CANCELLED_EXIT_CODE, reason=f"Slurm says CANCELLED{why}", **common
        )
    if row.state == "COMPLETED":
        return Verdict(
            JobState.LOST,
            1,
            reason="Slurm says COMPLETED, but nothing in the job's directory says so: is the disk full?",
            **common,
        )
    words = last_lines(job_dir / "logs" / "slurm.out", 3)
    said = f": {'; '.join(words)}" if words else ""
    return Verdict(
        JobState.FAILED, code or 1, reason=f"Slurm says {row.state}{why}{said}", **common
    )
