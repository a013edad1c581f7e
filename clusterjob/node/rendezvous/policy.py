"""Decide what follows a failure by its kind, and whether the job runs again (--until-done).

A job that runs again has the verdict PREEMPTED: the script that the scheduler runs queues it.
The job ends on success, on a failure of its own code, or after two attempts in a row without
progress. An attempt makes progress if it leaves a newer file in the checkpoint directory; without
such a directory, if it lasts a minute.
Times of files are only compared with times of files in the same directory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clusterjob.node.logs import ends
from clusterjob.node.options import LaunchOptions, Retry
from clusterjob.node.system import files
from clusterjob.node.verdict import (
    PREEMPTED_EXIT_CODE,
    Failure,
    FailureKind,
    JobState,
    RoundEnd,
    Verdict,
)


@dataclass(frozen=True)
class Rule:
    """What follows a failure of one kind, unless --retry names the kind.

    Attributes:
        avoid: whether it is a failure of a machine: the next round leaves out that node. Spare
            nodes and an elastic size allow such restarts without --max-restarts.
        charged: whether the restart counts for --max-restarts.
        once: whether the same error in a second round ends the job.
        pause: whether restarts in a row are delayed more and more, up to 60 s.
        requeue: whether --until-done queues the job again after the last restart.
        why: why there is no restart; empty for a kind with restarts, as often as --max-restarts.
    """

    avoid: bool = False
    charged: bool = True
    once: bool = False
    pause: bool = False
    requeue: bool = True
    why: str = ""


_AGAIN = "it would fail again"


# docs/reference.md shows this table; a test compares them.
RULES: dict[FailureKind, Rule] = {
    FailureKind.CODE: Rule(once=True, requeue=False),
    FailureKind.IMPORT: Rule(requeue=False, why=f"a module cannot be imported: {_AGAIN}"),
    FailureKind.OOM_HOST: Rule(requeue=False, why="the memory is too small for this job"),
    FailureKind.OOM_DEVICE: Rule(requeue=False, why="the GPU's memory is too small for this job"),
    FailureKind.DEVICE: Rule(avoid=True),
    FailureKind.DISK: Rule(avoid=True, pause=True),
    FailureKind.NETWORK: Rule(avoid=True),
    FailureKind.NODE_LOST: Rule(avoid=True),
    FailureKind.PROCESS_LOST: Rule(),
    FailureKind.LAUNCH: Rule(avoid=True, once=True, requeue=False),
    FailureKind.RENDEZVOUS: Rule(),
    FailureKind.EARLY_EXIT: Rule(requeue=False),
    FailureKind.TERMINATED: Rule(),
    FailureKind.SIGNAL: Rule(),
    FailureKind.EXIT_CODE: Rule(requeue=False),
    FailureKind.HANG: Rule(),
    FailureKind.PREEMPTED: Rule(charged=False),
}

_LONGEST_PAUSE = 60.0  # seconds
_END = re.compile(r" \((?:exited with code \d+|killed by SIG\w+)\)")
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)  # addresses, steps, ranks, pids


@dataclass(frozen=True)
class Restart:
    """What follows the end of a round.

    Attributes:
        retry: whether the workers are started again.
        avoid: whether the next round must leave out the node of the root cause.
        why: why there is no restart although some are left; empty if that is obvious.
        pause: seconds to wait before the next round.
    """

    retry: bool = False
    avoid: bool = False
    why: str = ""
    pause: float = 0.0


def decide(
    failure: Failure,
    options: LaunchOptions,
    earlier: Sequence[RoundEnd],
    attempt: int,
    nnodes: int,
) -> Restart:
    """Decide what follows a failure.

    Args:
        failure: the root cause of the round.
        options: --max-restarts, whose count begins again with each attempt, and --retry, whose
            counts hold for the whole job.
        earlier: the rounds that ended before it.
        attempt: the number of this attempt.
        nnodes: the number of all nodes of the job, spare ones included.
    """
    kind, rule, retries = failure.kind, RULES[failure.kind], _retries(options)
    kinds = [each.kind for each in earlier if each.attempt == attempt]
    here = [FailureKind(each) for each in kinds if each in set(FailureKind)]
    if kind in retries:
        limit = _limit(retries[kind], options)
        again, why = sum(each.kind == kind for each in earlier) < limit, ""
        again = again and not retries[kind].memory  # else the job is queued again
    else:
        # Of the failures of machines, the first ones are free.
        counted = [each for each in here if each not in retries]
        free, machines = options.machine_restarts(nnodes), sum(RULES[e].avoid for e in counted)
        charged = sum(RULES[each].charged for each in counted) - min(free, machines)
        used = charged if rule.charged else counted.count(kind)
        again = used < options.max_restarts or (rule.avoid and machines < free)
        why = _why_not(failure, rule, earlier) if again else ""
    if why or not again:
        return Restart(why=why)
    # A full disk would soon use all restarts.
    row = len(list(itertools.takewhile(lambda each: RULES[each].pause, [kind, *reversed(here)])))
    pause = min(2.0 ** (row - 2), _LONGEST_PAUSE) if row > 1 else 0.0
    # A failure that only names a lost peer does not show whose node is at fault.
    return Restart(retry=True, avoid=rule.avoid and not failure.effect, pause=pause)


def more_memory(verdict: Verdict, options: LaunchOptions, rounds: Sequence[RoundEnd]) -> float:
    """Return the factor of memory with which the job must be queued again; 0.0 if it must not.

    Args:
        verdict: the verdict of this attempt.
        options: --retry, whose counts hold for the whole job.
        rounds: the rounds of all attempts, the last one included.
    """
    retry = _retries(options).get(verdict.failure.kind) if verdict.failure is not None else None
    if retry is None or sum(each.kind == retry.kind for each in rounds) > _limit(retry, options):
        return 0.0
    return retry.memory


def most_restarts(options: LaunchOptions, nnodes: int) -> int:
    """Return the largest number of restarts that the options allow."""
    own = sum(_limit(retry, options) for retry in _retries(options).values())
    return options.max_restarts + options.machine_restarts(nnodes) + own


def _retries(options: LaunchOptions) -> dict[FailureKind, Retry]:
    return {each.kind: each for each in map(Retry.parse, options.retry)}


def _limit(retry: Retry, options: LaunchOptions) -> int:
    return max(1, options.max_restarts) if retry.times is None else retry.times


def _why_not(failure: Failure, rule: Rule, earlier: Sequence[RoundEnd]) -> str:
    """Return why the same failure would follow a restart; empty if it is not proven."""
    if rule.why:
        return rule.why
    # Without a rank, it is the loss of a forkserver or a store, which any node may suffer.
    unstartable = failure.kind is FailureKind.LAUNCH and failure.rank is not None
    if rule.once and (failure.where or unstartable) and error_of(failure) in map(error_of, earlier):
        place = f" at {failure.where}" if failure.where else ""
        return f"the same error{place} in two attempts: {_AGAIN}"
    return ""


def error_of(end: Failure | RoundEnd) -> tuple[str, str, str]:
    """Return what is equal for two failures by the same error; numbers in the text may differ."""
    text = _END.sub("", end.message[: RoundEnd.MAX_MESSAGE])
    return str(end.kind), _NUMBERS.sub("0", text), end.where


MAX_IDLE = 2  # attempts in a row without progress that end the job
SHORT_ATTEMPT = 60.0  # seconds; a shorter attempt makes no progress, without a checkpoint directory
_MAX_FILES = 100_000  # of the checkpoint directory to look at
_NO_CHECKPOINT = re.compile(r"(?:\.log|\.out|\.err|\.pyc)$|^events\.out\.tfevents")  # file names
_WALK_TIMEOUT = 3.0  # seconds at the end of an attempt: a shared disk may hang


def begin_attempt(options: LaunchOptions, job_dir: Path, attempt: int) -> threading.Thread:
    """Record the newest checkpoint before the workers start; return the thread that does it."""

    def begin() -> None:
        known = _progress(job_dir)
        if not options.until_done or known.get("attempt") == attempt:  # on another node
            return
        found = newest(Path(options.checkpoint_dir)) if options.checkpoint_dir else None
        _write_progress(job_dir, known | {"attempt": attempt, "newest": found or 0})
        with contextlib.suppress(OSError):  # for the job's script
            (ends.directory(job_dir) / f"started.{attempt}").touch(0o600)

    return _in_thread(begin)


def end_attempt(
    options: LaunchOptions,
    job_dir: Path,
    verdict: Verdict,
    begun: threading.Thread,
    *,
    seconds: float,
    warned: bool,
) -> Verdict:
    """Return the verdict of the attempt, PREEMPTED if the job runs again.

    Args:
        options: whether to run again, the checkpoint directory, and the warning signal.
        job_dir: the job's directory.
        verdict: the verdict of the attempt.
        begun: the thread of `begin_attempt`.
        seconds: how long the attempt lasted.
        warned: whether the workers were warned of the attempt's end.
    """
    signalled = warned and bool(options.warn_signal)
    if not options.until_done or not _may_continue(verdict, signalled=signalled):
        return verdict
    if verdict.state is JobState.SUCCEEDED:
        verdict = replace(verdict, reason=f"its workers ended after {options.warn_signal}")
    again = replace(verdict, state=JobState.PREEMPTED, exit_code=PREEMPTED_EXIT_CODE)
    if verdict.state is JobState.PREEMPTED and verdict.started_at is None:
        return again  # the scheduler took the nodes before the workers had started
    begun.join(_WALK_TIMEOUT)
    known = _progress(job_dir)
    if options.checkpoint_dir:
        before = known.get("newest", 0)
        progress = begun.is_alive() or _is_newer(Path(options.checkpoint_dir), before)
        missing = f"left nothing newer in {options.checkpoint_dir}"
    else:
        progress, missing = seconds >= SHORT_ATTEMPT, f"ended within {SHORT_ATTEMPT:g} s"
    idle = 0 if progress else known.get("idle", 0) + 1
    _write_progress(job_dir, known | {"idle": idle})
    if idle < MAX_IDLE:
        return again
    code = verdict.exit_code if verdict.state is JobState.FAILED else 1
    reason = f"{MAX_IDLE} attempts in a row {missing}; the last: {verdict.reason}"
    return replace(verdict, state=JobState.FAILED, exit_code=code, reason=reason)


def _is_newer(directory: Path, before: int) -> bool:
    """Return whether a file has changed since then; True if that cannot be found out in time."""
    found: list[int | None] = []
    _in_thread(lambda: found.append(newest(directory))).join(_WALK_TIMEOUT)
    latest = found[0] if found else None
    return latest is None or latest > before


def _progress(job_dir: Path) -> dict[str, Any]:
    found: Any = None
    with contextlib.suppress(OSError):
        found = files.read_json(ends.directory(job_dir) / "progress.json")
    return found if isinstance(found, dict) else {}


def _write_progress(job_dir: Path, data: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        files.write_json(ends.directory(job_dir) / "progress.json", data)


def newest(directory: Path) -> int | None:
    """Return the latest change of a file below a directory; None if there are too many files.

    Args:
        directory: the directory; links in it are not followed.
    """
    latest = looked_at = 0
    for root, _, names in os.walk(directory):
        for name in names:
            looked_at += 1
            if looked_at > _MAX_FILES:
                return None
            if _NO_CHECKPOINT.search(name):
                continue
            with contextlib.suppress(OSError):  # removed meanwhile
                latest = max(latest, os.lstat(os.path.join(root, name)).st_mtime_ns)
    return latest


def _may_continue(verdict: Verdict, *, signalled: bool) -> bool:
    """Return whether another attempt may bring the job further.

    Args:
        verdict: the verdict of this attempt.
        signalled: whether the workers got the warning signal: every end is then an answer to it,
            also exit code 0.
    """
    if verdict.state is JobState.FAILED and verdict.failure is not None:
        return signalled or RULES[verdict.failure.kind].requeue
    return verdict.state is JobState.PREEMPTED or (
        signalled and verdict.state is JobState.SUCCEEDED
    )


def _in_thread(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread
