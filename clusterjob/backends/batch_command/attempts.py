"""Track the attempts of a platform's job, predict retries and compute an attempt's verdict."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from clusterjob.backends import job_progress, shared
from clusterjob.backends.batch_command.platform import Instance, Platform, Task
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
_STORED = ("tasks", "started", "ended", "collected", "missing_since")  # attributes of `Known`
_RAN = (JobState.RUNNING, JobState.SUCCEEDED, JobState.FAILED)  # states of tasks that have started
_LAG = 20.0  # maximum seconds between a task's end and its last lines in the platform's log
_SETTLING = 60.0  # seconds without a task in the list until the job counts as lost
_UNSEEN = 120.0  # seconds after a submission in doubt until a job without a task counts as lost
_RETRY_TIMEOUT = 60.0  # maximum seconds between the end of a retry's interval and its start
# Maximum seconds between the platform's clock and this machine's; a wrong time zone is possible.
CLOCKS_APART = 86_400.0
_DEADLINE = re.compile(r"deadline|time ?limit|ActiveDeadline", re.IGNORECASE)


@dataclass(frozen=True)
class Retries:
    """The platform's retry policy for a task.

    Attributes:
        times: the maximum number of retries; 0 for none.
        interval: seconds between an end and the next start.
        failures: whether the platform retries after a failure.
        reclaims: whether it retries, at most `times` times, after it has reclaimed the machines.
        preemptible: whether it may reclaim the machines. It then retries without a limit if
            `reclaims` is False.
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
    def progress(self) -> job_progress.Progress:
        """The progress of the job in this attempt."""
        return job_progress.Progress(self.task.started_at, restarts=self.attempt)

    @property
    def times(self) -> dict[str, Any]:
        """The times of the attempt's verdict."""
        return {"started_at": self.task.started_at, "ended_at": self.task.ended_at or now()}

    def verdict(
        self, state: JobState, exit_code: int, reason: str, failure: Failure | None = None
    ) -> Verdict:
        """Return a verdict of the attempt."""
        return Verdict(
            state,
            exit_code,
            reason=reason,
            failure=failure,
            attempt=self.attempt,
            restarts=self.attempt,
            **self.times,
        )


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
        path = job_dir / _FILE
        if path in _unsaved:
            return _unsaved[path]
        data = files.read_json(path)
        if not isinstance(data, dict):
            return cls(path)
        return cls(path, **{key: data[key] for key in data.keys() & _STORED})

    def meet(self, tasks: Sequence[Task]) -> Seen | None:
        """Add the tasks that the platform shows, the oldest first; return the newest attempt.

        Returns:
            None if the platform shows no task of the job.
        """
        before = asdict(self)
        for task in tasks:
            if task.id not in self.tasks:
                self.tasks.append(task.id)
            ran = task.started_at is not None or task.state in _RAN
            if ran and task.id not in self.started:
                self.started.append(task.id)
            if task.state.final:
                self.ended.setdefault(task.id, time.time())
        self.missing_since = None if tasks else self.missing_since or time.time()
        if asdict(self) != before:
            self._save()
        if not tasks:
            return None
        newest = max(tasks, key=lambda task: self.tasks.index(task.id))
        return Seen(newest, self.tasks.index(newest.id), first=self.tasks[0])

    def note_collected(self, task_id: str) -> None:
        """Record that a task's logs are complete on this machine, if `_LAG` has passed."""
        if time.time() > self.ended.get(task_id, time.time()) + _LAG:
            self.collected.append(task_id)
            self._save()

    def log_is_whole(self, seen: Seen) -> bool:
        """Return whether the log of an ended attempt is complete on the platform."""
        return time.time() > self.ended[seen.task.id] + _LAG or _long_ago(seen.task)

    def will_retry(self, seen: Seen, retries: Retries) -> bool:
        """Return whether the platform is about to start another attempt."""
        reclaimed = seen.task.state is JobState.CANCELLED
        if reclaimed and retries.preemptible and not retries.reclaims:
            requested = True  # the platform retries in this case without a limit
        else:
            requested = seen.attempt < retries.times and (
                retries.reclaims if reclaimed else retries.failures
            )
        latest = self.ended[seen.task.id] + retries.interval + _RETRY_TIMEOUT
        return requested and time.time() < latest and not _long_ago(seen.task)

    def lost(self, record: Record) -> str | None:
        """Return why a job without a task is lost; None while a task may still appear."""
        if self.tasks or record.handle is not None:
            if time.time() <= (self.missing_since or time.time()) + _SETTLING:
                return None
            if self.tasks:
                return "the platform does not show its task any more"
            return "the platform has never shown its task"
        if time.time() < shared.epoch(record.submitted_at) + _UNSEEN:
            return None
        return "the command that submitted it died before the platform had accepted the job"

    def _save(self) -> None:
        try:
            if self.path.parent.parent.parent.is_dir():
                private_dirs.make(self.path.parent)  # an array element has no directory at first
            files.write_json(self.path, {key: vars(self)[key] for key in _STORED})
            _unsaved.pop(self.path, None)
        except OSError:
            # The disk is full: keep the times in memory, so that the timeouts still expire.
            _unsaved[self.path] = self


_unsaved: dict[Path, Known] = {}  # data of this process that could not be written


def tasks_of(records: Collection[Record], platform: Platform) -> list[Task]:
    """Return the platform's tasks of some jobs of one account, the oldest first."""
    return platform.tasks(
        sorted({record.job_id for record in records}),
        min(shared.epoch(record.submitted_at) for record in records),
    )


def reason(seen: Seen, platform: Platform, *, cancelled: bool, detailed: bool) -> str:
    """Return the reason of the state of a running attempt; cancel the attempt if requested.

    Args:
        seen: the attempt.
        platform: its platform.
        cancelled: whether a user has cancelled the job.
        detailed: whether to query the reasons of the workers.
    """
    task = seen.task
    if cancelled and not task.ending:
        platform.cancel(task.id)
    if cancelled or task.state is JobState.RUNNING:
        return "it is being cancelled" if cancelled else ""
    since = f" since {task.created_at}" if task.created_at else ""
    instances = platform.instances(task.id) if detailed else []
    reasons = [
        f"{task.state_text or 'queued'} on the platform{since}",
        task.reason,
        *dict.fromkeys(instance.reason for instance in instances),
    ]
    return "; ".join(filter(None, reasons))


def retry_reason(seen: Seen, verdict: Verdict, retries: Retries) -> str:
    """Return the reason of the state of a job whose attempt had a verdict and is repeated."""
    of = f" of {retries.times + 1}" if seen.attempt < retries.times else ""
    again = (
        f"the platform starts it again (attempt {seen.attempt + 2}{of}); "
        f"it was {verdict.state.value.lower()}"
    )
    return f"{again}: {verdict.reason}" if verdict.reason else again


def cancel_requested(record: Record) -> bool:
    """Return whether a user has cancelled a job, or the array that it belongs to."""
    return ends.cancelled(record.job_dir) or ends.cancelled(record.whole_dir)


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
    if own is not None and not _shows_only_stop(own, task, cancelled=cancelled):
        return replace(own, restarts=seen.attempt)
    reasons = list(
        dict.fromkeys(filter(None, (task.reason, *(instance.reason for instance in instances))))
    )
    reported = "; ".join([f"the platform reports {task.state_text}", *reasons[:3]])
    if cancelled:
        return seen.verdict(JobState.CANCELLED, CANCELLED_EXIT_CODE, "cancelled")
    if any(_DEADLINE.search(reason) for reason in reasons):
        return seen.verdict(JobState.FAILED, TIMEOUT_EXIT_CODE, f"out of time: {reported}")
    if task.state is JobState.CANCELLED and retries.preemptible:
        why = f"the platform reclaimed its machines: {reported}"
        return seen.verdict(JobState.PREEMPTED, PREEMPTED_EXIT_CODE, why)
    if task.state is JobState.CANCELLED:
        why = f"cancelled on the platform, not by clusterjob: {reported}"
        return seen.verdict(JobState.CANCELLED, CANCELLED_EXIT_CODE, why)
    if task.state is JobState.SUCCEEDED and own is None:
        why = "the platform reports success; the log has no verdict"
        return seen.verdict(JobState.SUCCEEDED, 0, why)
    failed = _failed(instances)
    why = f"{failed.who}: {failed.message}" if failed is not None else reported
    return seen.verdict(
        JobState.FAILED,
        failed.exit_code if failed is not None else 1,
        reason=f"{why} (the log has no verdict)" if own is None else why,
        failure=failed,
    )


def _shows_only_stop(own: Verdict, task: Task, *, cancelled: bool) -> bool:
    """Return whether the agents' verdict shows only that the attempt was stopped, not why.

    A platform that stops a task may also signal the workers. A worker may then end before its agent
    reacts, and the verdict names a killed worker. If the platform stops one node before the others,
    or during its setup lines, the verdict names a failed node.
    """
    if own.state in (JobState.PREEMPTED, JobState.CANCELLED):
        return cancelled or own.state is JobState.CANCELLED
    return (
        task.state is JobState.CANCELLED
        and own.failure is not None
        and (own.failure.rank is None or own.failure.signal in ("SIGTERM", "SIGKILL"))
    )


def _failed(instances: Sequence[Instance]) -> Failure | None:
    """Return the failure of one node; a failed node takes precedence over a stopped node."""
    bad = [
        instance for instance in instances if instance.failed or instance.exit_code not in (None, 0)
    ]
    if not bad:
        return None
    worst = min(
        bad,
        key=lambda instance: (
            not instance.failed,
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


def _long_ago(task: Task) -> bool:
    """Return whether a task ended long ago, even if the clocks differ by `CLOCKS_APART`."""
    return task.ended_at is not None and time.time() > shared.epoch(task.ended_at) + CLOCKS_APART
