"""How a platform's job stands: its attempts, in their order; what is still to come; how one has
ended.
"""

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
_LAG = 20.0  # seconds that a log may need to show a task's last lines
_SETTLING = 60.0  # seconds for which a task may not be shown before it counts as gone
_UNSEEN = 120.0  # ... that was never shown, and of which it is not known whether it was taken
_RETRY_PATIENCE = 60.0  # seconds beyond the interval that a platform may take to start a task again
# Seconds by which the platform's clock may differ from this machine's, its time zone included.
CLOCKS_APART = 86_400.0
_DEADLINE = re.compile(r"deadline|time ?limit|ActiveDeadline", re.IGNORECASE)


@dataclass(frozen=True)
class Retries:
    """When a platform starts a task again by itself.

    Attributes:
        times: how often; 0 for never.
        interval: seconds between an end and the next start.
        failures: after a failure.
        reclaims: when it took the machines away.
        preemptible: whether it may do so; without `reclaims` it starts the task again all the same,
            as often as it likes.
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
        task: it, as the platform shows it.
        attempt: its number, from 0.
        first: the id of the first one.
    """

    task: Task
    attempt: int
    first: str

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return self.task.state.final


@dataclass
class Known:
    """What was seen of a job's tasks, kept in its directory: which there were, when each was first
    seen ended.

    Times are this machine's own, seconds of the epoch: the platform's clock is another.
    """

    path: Path
    tasks: list[str] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    ended: dict[str, float] = field(default_factory=dict)
    collected: list[str] = field(default_factory=list)
    missing_since: float | None = None

    @classmethod
    def of(cls, job_dir: Path) -> Known:
        """Return what is known of the job in this directory."""
        if job_dir / _FILE in _unsaved:
            return _unsaved[job_dir / _FILE]
        data = files.read_json(job_dir / _FILE)
        names = ("tasks", "started", "ended", "collected", "missing_since")
        return cls(
            job_dir / _FILE,
            **{name: data[name] for name in names if isinstance(data, dict) and name in data},
        )

    def meet(self, tasks: Sequence[Task]) -> Seen | None:
        """Take in what the platform shows of the job, the oldest first; return the newest attempt,
        None where it shows none.
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
        """Note that an attempt's logs are here, if they are whole."""
        if time.time() > self.ended.get(task_id, time.time()) + _LAG:
            self.collected.append(task_id)
            self._save()

    def log_is_whole(self, seen: Seen) -> bool:
        """Return whether the log of an attempt that has ended shows all that it ever will."""
        return time.time() > self.ended[seen.task.id] + _LAG or _long_ago(seen.task)

    def comes_again(self, seen: Seen, retries: Retries) -> bool:
        """Return whether the platform is about to start a job again."""
        taken_away = seen.task.state is JobState.CANCELLED
        covered = seen.attempt < retries.times and (
            retries.reclaims if taken_away else retries.failures
        )
        if not covered and not (taken_away and retries.preemptible and not retries.reclaims):
            return False
        return time.time() < self.ended[
            seen.task.id
        ] + retries.interval + _RETRY_PATIENCE and not _long_ago(seen.task)

    def lost(self, record: Record) -> str | None:
        """Return why a job that the platform does not show is lost; None while it may still be
        shown.
        """
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
        return "the command that submitted it died before the platform had taken the job"

    def _save(self) -> None:
        try:
            if self.path.parent.parent.parent.is_dir():
                private_dirs.make(self.path.parent)  # of an array's element
            files.write_json(
                self.path, {key: value for key, value in asdict(self).items() if key != "path"}
            )
            _unsaved.pop(self.path, None)
        except OSError:
            _unsaved[self.path] = (
                self  # a full disk: whoever waits has to see time pass all the same
            )


_unsaved: dict[Path, Known] = {}  # of this process, where the disk took no note


def waits(task: Task) -> str:
    """Return what a task waits for."""
    since = f" since {task.created_at}" if task.created_at else ""
    return "; ".join(
        filter(None, (f"{task.words or 'queued'} on the platform{since}", task.reason))
    )


def wished_to_end(record: Record) -> bool:
    """Return whether somebody wished that a job end."""
    return ends.cancelled(record.job_dir) or (
        record.index is not None and ends.cancelled(record.job_dir.parent.parent)
    )


def being_submitted(record: Record) -> bool:
    """Return whether the process that submits a job is still at it, if it has not noted the handle."""
    return record.submitter is not None and record.submitter.alive()


def submitted_at(record: Record) -> float:
    """Return when a job was submitted, seconds of the epoch, by this machine's clock."""
    return _epoch(record.submitted_at)


def refused(job_dir: Path, seen: Seen) -> Verdict | None:
    """Return the end of an attempt whose nodes say that they could not start; None where they do
    not.
    """
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
    wished: bool,
) -> Verdict:
    """Return how an attempt has ended.

    Args:
        seen: the attempt.
        own: what its agents say.
        instances: what the platform says of its workers.
        retries: when the platform starts it again.
        wished: whether somebody wished that it end.
    """
    task = seen.task
    common: dict[str, Any] = {"attempt": seen.attempt, **_times(task)}
    reasons = list(
        dict.fromkeys(filter(None, (task.reason, *(instance.reason for instance in instances))))
    )
    says = "; ".join([f"the platform says {task.words}", *reasons[:3]])
    if own is not None and not _tells_less(own, task, wished=wished):
        return replace(own, restarts=seen.attempt)
    if wished:
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
            reason=f"out of time: {says}",
            restarts=seen.attempt,
            **common,
        )
    if task.state is JobState.CANCELLED and retries.preemptible:
        return Verdict(
            JobState.PREEMPTED,
            PREEMPTED_EXIT_CODE,
            reason=f"its machines were taken away: {says}",
            restarts=seen.attempt,
            **common,
        )
    if task.state is JobState.CANCELLED:
        why = f"ended on the platform, and not by clusterjob: {says}"
        return Verdict(
            JobState.CANCELLED, CANCELLED_EXIT_CODE, reason=why, restarts=seen.attempt, **common
        )
    if task.state is JobState.SUCCEEDED and own is None:
        return Verdict(
            JobState.SUCCEEDED,
            0,
            reason="the platform says so, and its log holds no verdict",
            restarts=seen.attempt,
            **common,
        )
    failed = _failed(instances)
    text = f"{failed.who}: {failed.message}" if failed is not None else says
    code = failed.exit_code if failed is not None else 1
    note = " (its log holds no verdict)" if own is None else ""
    return Verdict(
        JobState.FAILED,
        code,
        reason=f"{text}{note}",
        failure=failed,
        restarts=seen.attempt,
        **common,
    )


def _tells_less(own: Verdict, task: Task, *, wished: bool) -> bool:
    """Return whether a verdict says no more than that everything was stopped: agents cannot tell by
    whom, and why.

    A platform that stops a task may send its signal to workers too, and they may be quicker than
    their agents; and a node that it ends in its setup lines, or before another one, seems to have
    failed.
    """
    if own.state is JobState.PREEMPTED:
        return wished
    failure = own.failure
    killed = failure is not None and (
        failure.signal in ("SIGTERM", "SIGKILL") or failure.rank is None
    )
    return own.state is JobState.CANCELLED or (killed and task.state is JobState.CANCELLED)


def _failed(instances: Sequence[Instance]) -> Failure | None:
    """Return the failure of the node that the platform says most of: one that ended by itself
    before one that was ended.
    """
    bad = [
        instance
        for instance in instances
        if instance.exit_code not in (None, 0) or instance.words in ("Failed", "Exception")
    ]
    if not bad:
        return None
    worst = min(
        bad,
        key=lambda instance: (
            instance.words not in ("Exception", "Failed"),
            instance.exit_code == CANCELLED_EXIT_CODE,
            instance.node_rank,
        ),
    )
    code = worst.exit_code or 1
    return Failure(
        None,
        None,
        node_rank=worst.node_rank,
        host=worst.name,
        exit_code=code,
        signal=None,
        message=f"the platform says {worst.words}: {worst.reason or f'exit code {code}'}",
    )


def _times(task: Task) -> dict[str, Any]:
    return {"started_at": task.started_at, "ended_at": task.ended_at or now()}


def _long_ago(task: Task) -> bool:
    return task.ended_at is not None and time.time() > _epoch(task.ended_at) + CLOCKS_APART


def _epoch(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(timezone.utc).timestamp()
