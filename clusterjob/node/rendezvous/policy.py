"""Decide what follows a failure by its kind, and whether the job runs again (--until-done).

A job that runs again has the verdict PREEMPTED: the script that the scheduler runs queues it.
The job ends on success, on a failure of its own code, after two attempts in a row without progress,
or after three in a row that ended within a minute by the same error. An attempt makes progress if
it leaves a newer file in the checkpoint directory; without such a directory, if it lasts a minute.
Times of files are only compared with times of files in the same directory.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clusterjob.node.logs import ends
from clusterjob.node.options import LaunchOptions, Retry
from clusterjob.node.rendezvous.outcome import Outcome
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
        restarts: whether the workers are started again, as often as --max-restarts.
        avoid: whether it is a failure of a machine: the next round leaves out that node. Spare
            nodes and an elastic size allow such restarts without --max-restarts.
        charged: whether the restart counts for --max-restarts.
        once: whether the same error in a second round ends the job.
        pause: whether restarts in a row are delayed more and more, up to 60 s.
        requeue: whether --until-done queues the job again after the last restart.
        why: why there is no restart; empty for a kind with restarts.
    """

    restarts: bool = True
    avoid: bool = False
    charged: bool = True
    once: bool = False
    pause: bool = False
    requeue: bool = True
    why: str = ""


_AGAIN = "it would fail again"


def _never(why: str) -> Rule:
    return Rule(restarts=False, requeue=False, why=why)


# docs/reference.md shows this table; a test compares them.
RULES: dict[FailureKind, Rule] = {
    FailureKind.CODE: Rule(once=True, requeue=False),
    FailureKind.IMPORT: _never(f"a module cannot be imported: {_AGAIN}"),
    FailureKind.OOM_HOST: _never("the memory is too small for this job"),
    FailureKind.OOM_DEVICE: _never("the GPU's memory is too small for this job"),
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
_SYNTAX = re.compile(r"(?:SyntaxError|IndentationError|TabError)\b")
_WRONG_ARGUMENTS = 2  # the exit code of argparse and click
_USAGE = re.compile(r"usage: ", re.IGNORECASE)
_END = re.compile(r" \((?:exited with code \d+|killed by SIG\w+)\)")
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)  # addresses, steps, ranks, pids


@dataclass(frozen=True)
class Decision:
    """What follows the end of a round.

    Attributes:
        retry: whether the workers are started again.
        avoid: whether the next round must leave out the node of the root cause.
        charged: whether the restart counts for --max-restarts.
        why: why there is no restart although some are left; empty if that is obvious.
        pause: seconds to wait before the next round.
        more_memory: the factor of memory with which the scheduler must queue the job again; 0.0
            if it must not.
    """

    retry: bool
    avoid: bool = False
    charged: bool = False
    why: str = ""
    pause: float = 0.0
    more_memory: float = 0.0


class Policy:
    """The restarts of one attempt of a job.

    Args:
        options: --max-restarts, whose count begins again with each attempt, and --retry, whose
            counts hold for the whole job.
        earlier: the rounds that have ended.
        attempt: the number of this attempt.
        free: how many failures of machines are restarted without being charged.

    Attributes:
        most: the largest number of restarts that these options allow.
    """

    def __init__(
        self,
        options: LaunchOptions,
        earlier: Sequence[RoundEnd] = (),
        attempt: int = 0,
        *,
        free: int = 0,
    ) -> None:
        self._max_restarts = options.max_restarts
        chosen = [Retry.parse(text) for text in options.retry]
        self._retries = {each.kind: each for each in chosen}
        self._kinds = Counter(each.kind for each in earlier)  # of the whole job
        self._in_a_row = 0  # rounds that ended with a failure whose restarts are delayed
        self._charged, self._free = 0, free  # used, and left
        self._uncharged: Counter[FailureKind] = Counter()
        self._errors = {error_of(each.kind, each.message, where=each.where) for each in earlier}
        for each in earlier:
            if each.attempt == attempt and each.kind in set(FailureKind):
                self._count(FailureKind(each.kind))
        self.most = options.max_restarts + free + sum(map(self._limit, self._retries.values()))

    def decide(self, end: Outcome) -> Decision:
        """Decide what follows a round, and count it."""
        failure = end.failure
        if failure is None:  # success, cancel, time limit, or preemption
            return Decision(retry=False)
        decision = self._decide(failure)
        self._kinds[failure.kind] += 1
        self._errors.add(error_of(failure.kind, failure.message, where=failure.where))
        if not decision.retry:
            return decision
        self._count(failure.kind)
        return replace(decision, pause=self._pause())

    def _pause(self) -> float:
        """Return the seconds before the next round: a full disk would soon use all restarts."""
        return min(2.0 ** (self._in_a_row - 2), _LONGEST_PAUSE) if self._in_a_row > 1 else 0.0

    def _count(self, kind: FailureKind) -> None:
        """Count a restart after a failure of this kind in this attempt."""
        self._in_a_row = self._in_a_row + 1 if RULES[kind].pause else 0
        if kind in self._retries:
            self._uncharged[kind] += 1
        elif RULES[kind].avoid and self._free:
            self._free -= 1
        elif RULES[kind].charged:
            self._charged += 1
        else:
            self._uncharged[kind] += 1

    def _decide(self, failure: Failure) -> Decision:
        rule = RULES[failure.kind]
        # A failure that only names a lost peer does not show whose node is at fault.
        avoid = rule.avoid and not failure.effect
        own = self._retries.get(failure.kind)
        if own is not None:
            retry = self._kinds[failure.kind] < self._limit(own)
            if retry and own.memory:
                return Decision(retry=False, more_memory=own.memory)
            return Decision(retry, avoid=retry and avoid)
        count = self._charged if rule.charged else self._uncharged[failure.kind]
        free = rule.avoid and self._free > 0
        if count >= self._max_restarts and not free:
            return Decision(retry=False)
        why = self._why_not(failure, rule)
        return Decision(
            not why, avoid=avoid and not why, charged=rule.charged and not free, why=why
        )

    def _limit(self, own: Retry) -> int:
        return max(1, self._max_restarts) if own.times is None else own.times

    def _why_not(self, failure: Failure, rule: Rule) -> str:
        """Return why the same failure would follow a restart; empty if it is not proven."""
        if not rule.restarts:
            return rule.why
        if failure.kind is FailureKind.CODE and _SYNTAX.match(failure.message):
            return f"{failure.message.partition(':')[0]}: {_AGAIN}"
        if (
            failure.kind is FailureKind.EXIT_CODE
            and failure.exit_code == _WRONG_ARGUMENTS
            and any(map(_USAGE.match, failure.last_lines))
        ):
            return f"its arguments are wrong: {_AGAIN}"
        error = error_of(failure.kind, failure.message, where=failure.where)
        # Without a rank, it is the loss of a forkserver or a store, which any node may suffer.
        unstartable = failure.kind is FailureKind.LAUNCH and failure.rank is not None
        if rule.once and (failure.where or unstartable) and error in self._errors:
            place = f" at {failure.where}" if failure.where else ""
            return f"the same error{place} in two attempts: {_AGAIN}"
        return ""


def error_of(kind: str, message: str, where: str) -> tuple[str, str, str]:
    """Return what is equal for two failures by the same error; numbers in the text may differ."""
    text = _END.sub("", message[: RoundEnd.MAX_MESSAGE])
    return str(kind), _NUMBERS.sub("0", text), where


MAX_IDLE = 2  # attempts in a row without progress that end the job
MAX_EQUAL = 3  # short attempts in a row with the same error that end the job
SHORT_ATTEMPT = 60.0  # seconds; a shorter attempt makes no progress, without a checkpoint directory
_MAX_FILES = 100_000  # maximum entries of the checkpoint directory to look at
_NO_CHECKPOINT = re.compile(r"(?:\.log|\.out|\.err|\.pyc)$|^events\.out\.tfevents")  # file names
_WALK_TIMEOUT = 3.0  # seconds at the end of an attempt: a shared disk may hang


class UntilDone:
    """The decision after one attempt of a job.

    Args:
        options: whether to run again, the checkpoint directory, and the warning signal.
        job_dir: the job's directory.
        attempt: the number of the attempt, from 0.
    """

    def __init__(self, options: LaunchOptions, job_dir: Path, attempt: int) -> None:
        self._options = options
        self._job_dir = job_dir
        self._file = ends.directory(job_dir) / "progress.json"
        self._attempt = attempt
        self._begun = time.monotonic()
        self._newest_before = self._equal = 0  # equal: short attempts that ended with this error
        self._error = ""
        self._idle_before = 0
        if options.until_done:
            self._walk = _in_thread(self._begin)

    def _begin(self) -> None:
        """Record the newest file of the checkpoint directory before the workers start."""
        known = files.read_json(self._file)
        known = known if isinstance(known, dict) else {}
        self._idle_before = _number(known.get("idle"))
        self._error, self._equal = str(known.get("error", "")), _number(known.get("equal"))
        if known.get("attempt") == self._attempt:  # another node has begun this attempt
            self._newest_before = _number(known.get("newest"))
            return
        if self._options.checkpoint_dir:
            self._newest_before, _ = newest(Path(self._options.checkpoint_dir))
        self._write(self._idle_before)
        ends.note_started(self._job_dir, self._attempt)

    def decide(self, verdict: Verdict, *, warned: bool) -> Verdict:
        """Return the verdict of the attempt, PREEMPTED if the job runs again.

        Args:
            verdict: the verdict of the attempt.
            warned: whether the workers were warned of the attempt's end.
        """
        signalled = warned and bool(self._options.warn_signal)
        if not self._options.until_done or not _may_continue(verdict, signalled=signalled):
            return verdict
        if verdict.state is JobState.SUCCEEDED:
            reason = f"its workers ended after {self._options.warn_signal}"
            verdict = replace(verdict, reason=reason)
        again = replace(verdict, state=JobState.PREEMPTED, exit_code=PREEMPTED_EXIT_CODE)
        if verdict.state is JobState.PREEMPTED and verdict.started_at is None:
            return again  # the scheduler took the nodes before the workers had started
        idle = 0 if self._made_progress() else self._idle_before + 1
        self._count_equal(verdict)
        self._write(idle)
        if idle < MAX_IDLE and self._equal < MAX_EQUAL:
            return again
        code = verdict.exit_code if verdict.state is JobState.FAILED else 1
        why = f"{MAX_IDLE} attempts in a row {self._missing_progress}"
        if idle < MAX_IDLE:
            why = (
                f"{MAX_EQUAL} attempts in a row ended within {SHORT_ATTEMPT:g} s by the same error"
            )
        reason = f"{why}; the last: {verdict.reason}"
        return replace(verdict, state=JobState.FAILED, exit_code=code, reason=reason)

    @property
    def _missing_progress(self) -> str:
        if self._options.checkpoint_dir:
            return f"left nothing newer in {self._options.checkpoint_dir}"
        return f"ended within {SHORT_ATTEMPT:g} s"

    def _count_equal(self, verdict: Verdict) -> None:
        """Count the short attempts in a row that ended with the same error."""
        failure, seconds = verdict.failure, time.monotonic() - self._begun
        if failure is None or seconds >= SHORT_ATTEMPT:
            self._error, self._equal = "", 0
            return
        error = repr(error_of(failure.kind, failure.message, where=failure.where))
        self._equal = self._equal + 1 if error == self._error else 1
        self._error = error

    def _made_progress(self) -> bool:
        """Return whether the attempt made progress; True if that cannot be found out in time."""
        self._walk.join(_WALK_TIMEOUT)
        if not self._options.checkpoint_dir:
            return time.monotonic() - self._begun >= SHORT_ATTEMPT
        if self._walk.is_alive():
            return True
        found: list[bool] = []

        def look() -> None:
            latest, complete = newest(
                Path(self._options.checkpoint_dir), newer_than=self._newest_before
            )
            found.append(latest > self._newest_before or not complete)

        _in_thread(look).join(_WALK_TIMEOUT)
        return not found or found[0]

    def _write(self, idle: int) -> None:
        data = {
            "attempt": self._attempt,
            "newest": self._newest_before,
            "idle": idle,
            "error": self._error,
            "equal": self._equal,
        }
        with contextlib.suppress(OSError):
            files.write_json(self._file, data)


def newest(directory: Path, newer_than: int | None = None) -> tuple[int, bool]:
    """Return the latest change of a file below a directory, and whether all were looked at.

    Args:
        directory: the directory; links in it are not followed.
        newer_than: nanoseconds since the epoch; end the search at the first file that is newer.
    """
    latest, looked_at, todo = 0, 0, [os.fspath(directory)]
    while todo:
        try:
            with os.scandir(todo.pop()) as entries:
                for entry in entries:
                    looked_at += 1
                    if looked_at > _MAX_FILES:
                        return latest, False
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
                        continue
                    if _NO_CHECKPOINT.search(entry.name):
                        continue
                    with contextlib.suppress(OSError):  # removed meanwhile
                        latest = max(latest, entry.stat(follow_symlinks=False).st_mtime_ns)
                    if newer_than is not None and latest > newer_than:
                        return latest, True
        except OSError:  # removed meanwhile, or not made yet
            continue
    return latest, True


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


def _number(value: object) -> int:
    return value if type(value) is int and value >= 0 else 0
