"""Decide at the end of an attempt whether the job runs again (--until-done).

A job that runs again has the verdict PREEMPTED: the script that the scheduler runs queues it.
The job ends on success, on a failure of its own code, after two attempts in a row without progress,
or after three in a row that ended within a minute by the same error. An attempt makes progress if
it leaves a newer file in the checkpoint directory; without such a directory, if it lasts a minute.
The coordinator uses this module; times of files are only compared with times of files in the same
directory.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from clusterjob.node.logs import ends
from clusterjob.node.options import LaunchOptions
from clusterjob.node.rendezvous.policy import RULES, error_of
from clusterjob.node.system import files
from clusterjob.node.verdict import PREEMPTED_EXIT_CODE, JobState, Verdict

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
