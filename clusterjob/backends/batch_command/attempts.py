"""Track the attempts of a platform's job, predict retries and compute an attempt's verdict."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from clusterjob.backends.batch_command.platform import Instance, Task
from clusterjob.core.records import Record
from clusterjob.node.logs import ends
from clusterjob.node.logs.events import now
from clusterjob.node.system import files, private_dirs
from clusterjob.node.verdict import (
    CANCELLED_EXIT_CODE,
    PREEMPTED_EXIT_CODE,
    TIMEOUT_EXIT_CODE,
    Failure,
    JobState,
    Verdict,
)

_FILE = "platform.json"
_LAG = 20.0  # maximum seconds until a log shows a task's last lines
_SETTLING = 60.0  # seconds without a task in the list until the job counts as lost
_UNSEEN = 120.0  # seconds after a submission in doubt until a job without a task counts as lost
_RETRY_TIMEOUT = 60.0  # maximum seconds after the interval until the platform starts a retry
# Seconds by which the platform's clock may differ from this machine's, its time zone included.
CLOCKS_APART = 86_400.0
_DEADLINE = re.compile(r"deadline|time ?limit|ActiveDeadline", re.IGNORECASE)


@dataclass(frozen=True)
class Retries:
    """The platform's retry policy for a task.

    Attributes:
        times: the maximum number of retries; 0 for none.
        interval: seconds between an end and the next start.
        failures: whether the platform retries after a failure.
        reclaims: whether a retry after the platform has reclaimed the machines is requested; such
            retries count for `times`.
        preemptible: whether the platform may reclaim the machines. If it may, it also retries
            without `reclaims`, and then without a limit.
    """

    times: int = 0
    interval: float = 0.0
    failures: bool = False
    reclaims: bool = False
    preemptible: bool = False


@dataclass(frozen=True)
class Seen:
    """The newest attempt of a job.

    Attributes:
        task: the attempt's task on the platform.
        attempt: its number, from 0.
        first: the id of the first attempt's task.
    """

    task: Task
    attempt: int
    first: str

    @property
    def ended(self) -> bool:
        """Whether the attempt has ended."""
        return self.task.state.final


@dataclass
class Known:
    """The known tasks of a job, stored in the job's directory.

    Times are seconds since the epoch by this machine's clock, which may differ from the platform's.

    Attributes:
        path: the file that stores the data.
        tasks: ids of all tasks, in the order of the attempts.
        started: ids of the tasks that have run.
        ended: for each ended task, the time of the first poll that showed its end.
        collected: ids of the tasks whose logs are complete on this machine.
        missing_since: time since which the platform shows no task of the job; None if it shows a
            task.
    """

    path: Path
    tasks: list[str] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    ended: dict[str, float] = field(default_factory=dict)
    collected: list[str] = field(default_factory=list)
    missing_since: float | None = None

    @classmethod
    def of(cls, job_dir: Path) -> Known:
        """Read the known tasks of the job in this directory."""
        if job_dir / _FILE in _unsaved:
            return _unsaved[job_dir / _FILE]
        data = files.read_json(job_dir / _FILE)
        names = ("tasks", "started", "ended", "collected", "missing_since")
        return cls(
            job_dir / _FILE,
            **{name: data[name] for name in names if isinstance(data, dict) and name in data},
        )

    def meet(self, tasks: Sequence[Task]) -> Seen | None:
        """Add the tasks that the platform shows, the oldest first; return the newest attempt.

        Returns:
            None if the platform shows no task of the job.
        """
        before = asdict(self)
        for task in tasks:
            if task.id not in self.tasks:
                self.tasks.append(task.id)
            ran = task.started_at is not None or task.state in (
                JobState.RUNNING,
                JobState.SUCCEEDED,
                JobState.FAILED,
            )
            if ran and task.id not in self.started:
                self.started.append(task.id)
            if task.state.final:
                self.ended.setdefault(task.id, time.time())
        shown = [task for task in tasks if task.id in self.tasks]
        self.missing_since = None if shown else self.missing_since or time.time()
        if asdict(self) != before:
            self._save()
        if not shown:
            return None
        newest = max(shown, key=lambda task: self.tasks.index(task.id))
        return Seen(newest, self.tasks.index(newest.id), first=self.tasks[0])

    def note_collected(self, task_id: str) -> None:
        """Record that an attempt's logs are complete on this machine, if enough time has passed."""
        if time.time() > self.ended.get(task_id, time.time()) + _LAG:
            self.collected.append(task_id)
            self._save()

    def log_is_whole(self, seen: Seen) -> bool:
        """Return whether the log of an ended attempt is complete on the platform."""
        return time.time() > self.ended[seen.task.id] + _LAG or _long_ago(seen.task)

    def will_retry(self, seen: Seen, retries: Retries) -> bool:
        """Return whether the platform is about to start another attempt."""
        taken_away = seen.task.state is JobState.CANCELLED
        covered = seen.attempt < retries.times and (
            retries.reclaims if taken_away else retries.failures
        )
        if not covered and not (taken_away and retries.preemptible and not retries.reclaims):
            return False
        return time.time() < self.ended[
            seen.task.id
        ] + retries.interval + _RETRY_TIMEOUT and not _long_ago(seen.task)

    def lost(self, record: Record) -> str | None:
        """Return why a job without a task is lost; None while a task may still appear."""
        missing_for = time.time() - (self.missing_since or time.time())
        if self.tasks or record.handle is not None:
            why = (
                "the platform does not show its task any more"
                if self.tasks
                else "the platform has never shown its task"
            )
            return why if missing_for > _SETTLING else None
        if time.time() < submitted_at(record) + _UNSEEN:
            return None
        return "the command that submitted it died before the platform had accepted the job"

    def _save(self) -> None:
        try:
            if self.path.parent.parent.parent.is_dir():
                private_dirs.make(self.path.parent)  # the directory of an array element
            files.write_json(
                self.path, {key: value for key, value in asdict(self).items() if key != "path"}
            )
            _unsaved.pop(self.path, None)
        except OSError:
            # The disk is full: keep the times in memory, so that the timeouts still expire.
            _unsaved[self.path] = self


_unsaved: dict[Path, Known] = {}  # data of this process that could not be written


def waits(task: Task) -> str:
    """Return the reason of a task's wait as one line."""
    since = f" since {task.created_at}" if task.created_at else ""
    return "; ".join(
        filter(None, (f"{task.state_text or 'queued'} on the platform{since}", task.reason))
    )


def cancel_requested(record: Record) -> bool:
    """Return whether a user has cancelled a job, or the array that it belongs to."""
    return ends.cancelled(record.job_dir) or ends.cancelled(record.whole_dir)


def being_submitted(record: Record) -> bool:
    """Return whether the process that submits a job is still alive."""
    return record.submitter is not None and record.submitter.alive()


def submitted_at(record: Record) -> float:
    """Return a job's submission time, in seconds since the epoch by this machine's clock."""
    return _epoch(record.submitted_at)


def refused(job_dir: Path, seen: Seen) -> Verdict | None:
    """Return the verdict of an attempt if one of its nodes could not start; else None."""
    for failure in ends.refusals(job_dir, seen.attempt):
        return Verdict(
            JobState.FAILED,
            failure.exit_code,
            reason=f"{failure.who}: {failure.message}",
            failure=failure,
            attempt=seen.attempt,
            **_times(seen.task),
        )
    return None


def verdict(
    seen: Seen,
    own: Verdict | None,
    instances: Sequence[Instance],
    retries: Retries,
    *,
    cancelled: bool,
) -> Verdict:
    """Return the verdict of an ended attempt.

    Args:
        seen: the attempt.
        own: the verdict of its agents; None if they wrote no verdict.
        instances: the states of its workers on the platform.
        retries: the platform's retry policy.
        cancelled: whether a user has cancelled the job.
    """
    task = seen.task
    common: dict[str, Any] = {"attempt": seen.attempt, **_times(task)}
    reasons = list(
        dict.fromkeys(filter(None, (task.reason, *(instance.reason for instance in instances))))
    )
    reported = "; ".join([f"the platform reports {task.state_text}", *reasons[:3]])
    if own is not None and not _tells_only_stop(own, task, cancelled=cancelled):
        return replace(own, restarts=seen.attempt)
    if cancelled:
        return Verdict(
            JobState.CANCELLED,
            CANCELLED_EXIT_CODE,
            reason="cancelled",
            restarts=seen.attempt,
            **common,
        )
    if any(_DEADLINE.search(reason) for reason in reasons):
        return Verdict(
            JobState.FAILED,
            TIMEOUT_EXIT_CODE,
            reason=f"out of time: {reported}",
            restarts=seen.attempt,
            **common,
        )
    if task.state is JobState.CANCELLED and retries.preemptible:
        return Verdict(
            JobState.PREEMPTED,
            PREEMPTED_EXIT_CODE,
            reason=f"the platform reclaimed its machines: {reported}",
            restarts=seen.attempt,
            **common,
        )
    if task.state is JobState.CANCELLED:
        why = f"cancelled on the platform, not by clusterjob: {reported}"
        return Verdict(
            JobState.CANCELLED, CANCELLED_EXIT_CODE, reason=why, restarts=seen.attempt, **common
        )
    if task.state is JobState.SUCCEEDED and own is None:
        return Verdict(
            JobState.SUCCEEDED,
            0,
            reason="the platform reports success; the log has no verdict",
            restarts=seen.attempt,
            **common,
        )
    failed = _failed(instances)
    text = f"{failed.who}: {failed.message}" if failed is not None else reported
    code = failed.exit_code if failed is not None else 1
    note = " (the log has no verdict)" if own is None else ""
    return Verdict(
        JobState.FAILED,
        code,
        reason=f"{text}{note}",
        failure=failed,
        restarts=seen.attempt,
        **common,
    )


def _tells_only_stop(own: Verdict, task: Task, *, cancelled: bool) -> bool:
    """Return whether the agents' verdict shows only that the attempt was stopped, not why.

    A platform that stops a task may send the signal to the workers too, and a worker may end before
    its agent reacts. If the platform stops a node during the setup lines, or before other nodes,
    the agents report a failed node.
    """
    if own.state is JobState.PREEMPTED:
        return cancelled
    failure = own.failure
    killed = failure is not None and (
        failure.signal in ("SIGTERM", "SIGKILL") or failure.rank is None
    )
    return own.state is JobState.CANCELLED or (killed and task.state is JobState.CANCELLED)


def _failed(instances: Sequence[Instance]) -> Failure | None:
    """Return the failure of one node; prefer a node that failed to a node that was stopped."""
    bad = [
        instance
        for instance in instances
        if instance.exit_code not in (None, 0) or instance.state_text in ("Failed", "Exception")
    ]
    if not bad:
        return None
    worst = min(
        bad,
        key=lambda instance: (
            instance.state_text not in ("Exception", "Failed"),
            instance.exit_code == CANCELLED_EXIT_CODE,
            instance.node_rank,
        ),
    )
    code = worst.exit_code or 1
    return Failure.of_node(
        worst.node_rank,
        worst.name,
        exit_code=code,
        message=f"the platform reports {worst.state_text}: {worst.reason or f'exit code {code}'}",
    )


def _times(task: Task) -> dict[str, Any]:
    return {"started_at": task.started_at, "ended_at": task.ended_at or now()}


def _long_ago(task: Task) -> bool:
    return task.ended_at is not None and time.time() > _epoch(task.ended_at) + CLOCKS_APART


def _epoch(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(timezone.utc).timestamp()
