"""Base class of the backends for platforms with a submit command.

A job is submitted once, and all its attempts are tasks with one name. Its logs and verdict are read
from the platform's logs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NoReturn

from clusterjob.backends import job_progress, shared
from clusterjob.backends.base import Status
from clusterjob.backends.batch_command import attempts, submission
from clusterjob.backends.batch_command.log_stream import LogCollector, LogStream
from clusterjob.backends.batch_command.platform import Instance, Platform, Task, in_parallel
from clusterjob.core.capabilities import Capability
from clusterjob.core.plans import Plan
from clusterjob.core.records import Handle, Record
from clusterjob.core.spec import JobSpec
from clusterjob.errors import ClusterJobError
from clusterjob.node.verdict import JobState, Verdict

Account = tuple[tuple[str, str], ...]  # the variables that select an account, sorted

_MAX_DETAILS = 8  # maximum number of waiting jobs whose reason one status request queries


@dataclass
class _TaskList:
    """The result of the newest query of an account's tasks.

    Attributes:
        at: the time of the query, in monotonic seconds.
        names: the jobs that were queried.
        tasks: their tasks by name; after an error, the tasks of the query before.
        error_text: the error of the query; empty if it succeeded.
    """

    at: float = -1e9
    names: frozenset[str] = frozenset()
    tasks: Mapping[str, list[Task]] = field(default_factory=dict)
    error_text: str = ""


class PlatformBackend(ABC):
    """Run jobs on a platform that shares no disk with the submitter.

    A subclass also has the methods `plan` and `submit` of `clusterjob.backends.base.Backend`.
    """

    NAME: ClassVar[str]
    capabilities: ClassVar[Collection[Capability]] = ()
    hints: ClassVar[Mapping[Capability, str]] = {}

    def __init__(self) -> None:
        self._task_lists: dict[Account, _TaskList] = {}
        self._last: dict[str, Status] = {}
        self._collected: dict[str, float] = {}
        # Jobs that have ended after the last copy of their logs: copy the logs once more.
        self._just_ended: set[str] = set()
        self._logs = LogCollector()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Forget the task lists; no connection is open."""
        self._task_lists.clear()

    # -- to be implemented by each backend --------------------------------------------------------

    @abstractmethod
    def platform(self, account: Account) -> Platform:
        """Return the platform for one account."""

    @abstractmethod
    def account_of(self, options: Mapping[str, str]) -> Account:
        """Return the account that a job's options or the environment select."""

    @abstractmethod
    def retries(self, spec: JobSpec) -> attempts.Retries:
        """Return the platform's retry policy for a job."""

    @abstractmethod
    def poll(self, options: Mapping[str, str]) -> float:
        """Return the seconds between two polls while a job is followed."""

    # -- submitting --------------------------------------------------------------------------------

    def submit_tasks(
        self,
        plan: Plan,
        platform: Platform,
        tasks: Sequence[tuple[str, bytes]],
        suffix: str,
        rate: float,
    ) -> Handle:
        """Submit tasks one after the other; an error or Ctrl-C cancels the submitted tasks.

        Args:
            plan: the job.
            platform: the platform.
            tasks: the name of each task, and the content of its file, secrets included.
            suffix: the suffix of the file's name.
            rate: the maximum number of tasks per second.

        Raises:
            SubmitError: the platform refuses a task.
            SubmitInDoubtError: it is unknown whether the platform accepted a task.
        """
        at = time.time()
        names = submission.submit_all(
            plan, platform, tasks=tasks, suffix=suffix, rate=rate, since=at
        )
        if plan.array:
            names = [plan.job_id]
        return Handle(
            self.NAME,
            names[0],
            data={"ids": names, "account": dict(self.account_of(plan.spec.options)), "at": at},
        )

    def detach(self, handle: Handle) -> None:  # noqa: B027 - nothing to do on any platform
        """Do nothing: a platform's task does not depend on this process."""

    # -- status ------------------------------------------------------------------------------------

    def status(self, records: Sequence[Record]) -> dict[str, Status]:
        """Return the status of jobs: one query per account, then logs where needed."""
        found: dict[str, Status] = {}
        for account, group in self._by_account(records).items():
            listed, fresh = self._list_tasks(account, group)
            if not fresh and all(record.job_id in self._last for record in group):
                found |= {record.job_id: self._last[record.job_id] for record in group}
                continue
            waiting = [
                record.job_id
                for record in group
                if (tasks := listed.tasks.get(record.job_id))
                and tasks[-1].state is JobState.PENDING
            ]
            status_of = partial(
                self._status_of,
                listed=listed,
                platform=self.platform(account),
                detailed=waiting[:_MAX_DETAILS],
            )
            for record, status in zip(group, in_parallel(status_of, group), strict=True):
                found[record.job_id] = status
        with self._lock:
            self._last |= found
            self._just_ended |= {
                job_id for job_id, status in found.items() if status.verdict is not None
            }
        return found

    def _by_account(self, records: Sequence[Record]) -> dict[Account, list[Record]]:
        groups: dict[Account, list[Record]] = {}
        for record in records:
            groups.setdefault(self._account(record), []).append(record)
        return groups

    def _account(self, record: Record) -> Account:
        if record.handle is None:
            return self.account_of(record.job.options)
        account = record.handle.data.get("account", {})
        return tuple(sorted((str(key), str(value)) for key, value in account.items()))

    def _list_tasks(self, account: Account, records: Sequence[Record]) -> tuple[_TaskList, bool]:
        """Return the account's tasks, and whether they are the answer to a new query."""
        names = frozenset(record.job_id for record in records)
        pause = min(self.poll(record.job.options) for record in records)
        listed = self._task_lists.get(account, _TaskList())
        if time.monotonic() < listed.at + pause and names <= listed.names:
            return listed, False
        by_name: dict[str, list[Task]] = {}
        error_text = ""
        try:
            for task in attempts.tasks_of(records, self.platform(account)):
                by_name.setdefault(task.name, []).append(task)
        except ClusterJobError as error:
            error_text, by_name = error.message, dict(listed.tasks)
        self._task_lists[account] = listed = _TaskList(
            time.monotonic(), names, tasks=by_name, error_text=error_text
        )
        return listed, True

    def _status_of(
        self,
        record: Record,
        *,
        listed: _TaskList,
        platform: Platform,
        detailed: Collection[str],
    ) -> Status:
        """Return the status of one job.

        Args:
            record: the job.
            listed: the tasks of the account.
            platform: the platform of the account.
            detailed: ids of waiting jobs whose reason is queried.
        """
        known = attempts.Known.of(record.job_dir)
        seen = known.meet(listed.tasks.get(record.job_id, []))
        if listed.error_text or seen is None:
            return self._unseen(record, known, seen=seen, error_text=listed.error_text)
        cancelled = attempts.cancel_requested(record)
        handle = None
        if record.handle is None and not shared.being_submitted(record):
            submission.remove_leftovers(record)
            handle = self._adopted(record, seen)
        status = partial(seen.progress.status, handle=handle)
        try:
            if not seen.task.state.final:
                return status(
                    JobState.RUNNING if seen.task.state is JobState.RUNNING else JobState.PENDING,
                    attempts.reason(
                        seen,
                        platform,
                        cancelled=cancelled,
                        detailed=record.job_id in detailed,
                    ),
                )
            verdict = self._verdict(
                record, known, seen=seen, platform=platform, cancelled=cancelled
            )
        except ClusterJobError as error:
            return status(JobState.UNKNOWN, error.message)
        if verdict is None:
            return status(
                JobState.RUNNING,
                f"the platform reports {seen.task.state_text}; waiting for the rest of its log",
            )
        retries = self.retries(record.job)
        if (
            not cancelled
            and verdict.state is not JobState.SUCCEEDED
            and known.will_retry(seen, retries)
        ):
            return status(JobState.PENDING, attempts.retry_reason(seen, verdict, retries))
        return replace(shared.ended(verdict), handle=handle)

    def _unseen(
        self, record: Record, known: attempts.Known, seen: attempts.Seen | None, error_text: str
    ) -> Status:
        """Return the status if the platform does not show the job, or if its query failed."""
        if record.handle is None and shared.being_submitted(record):
            return Status(JobState.PENDING, "it is being submitted")
        if error_text and seen is not None:
            return seen.progress.status(
                JobState.UNKNOWN, f"{error_text} (it was {seen.task.state_text})"
            )
        if error_text:
            return Status(JobState.UNKNOWN, error_text)
        submission.remove_leftovers(record)
        why = known.lost(record)
        cancelled = attempts.cancel_requested(record)
        if why is None:
            return Status(
                JobState.UNKNOWN if known.tasks or record.handle is None else JobState.PENDING,
                f"{'it is being cancelled; ' if cancelled else ''}"
                "the platform does not show it (yet)",
            )
        if cancelled:
            # The request may be in the array's directory only: record it for this element too.
            shared.request_cancel(record)
        return shared.ended(
            shared.verdict_without_coordinator(
                record.job_dir,
                job_progress.Progress(restarts=max(0, len(known.tasks) - 1)),
                otherwise=why,
            )
        )

    def _adopted(self, record: Record, seen: attempts.Seen) -> Handle:
        """Return the handle of a job whose submitter died before it recorded a handle."""
        return Handle(
            self.NAME,
            seen.first if record.index is None else record.job_id,
            data={
                "ids": [seen.first if record.index is None else record.whole_id],
                "account": dict(self._account(record)),
                "at": shared.epoch(record.submitted_at),
            },
        )

    def _verdict(
        self,
        record: Record,
        known: attempts.Known,
        seen: attempts.Seen,
        platform: Platform,
        *,
        cancelled: bool,
    ) -> Verdict | None:
        """Return the verdict of an ended attempt; None while its log may still get a verdict."""
        stream = LogStream(record.job_dir, 0, attempt=seen.attempt)
        ran = seen.task.id in known.started
        instances = platform.instances(seen.task.id) if ran else []

        def collect(of: Sequence[Instance]) -> None:
            with contextlib.suppress(ClusterJobError):  # the task may have ended without a log
                self._logs.collect(
                    record.job_dir,
                    platform,
                    task_id=seen.task.id,
                    attempt=seen.attempt,
                    instances=of,
                )

        if ran and stream.verdict is None:
            collect([each for each in instances if each.node_rank == 0])
        own = stream.verdict
        # An agent that the platform stopped reports no failure. Read the other nodes' logs: one of
        # these nodes may have been unable to start.
        if ran and (own is None or (own.state is JobState.CANCELLED and not cancelled)):
            collect([each for each in instances if each.node_rank != 0])
            own = shared.refused(record.job_dir, seen.attempt, **seen.times) or own
            if own is None and not known.log_is_whole(seen):
                return None
        return attempts.verdict(
            seen, own, instances=instances, retries=self.retries(record.job), cancelled=cancelled
        )

    # -- logs --------------------------------------------------------------------------------------

    def collect(self, record: Record) -> None:
        """Copy the current logs of all attempts.

        Raises:
            ClusterJobError: the platform did not answer the first request for this job.
        """
        pause, now = self.poll(record.job.options), time.monotonic()
        with self._lock:
            last = record.job_id in self._just_ended
            self._just_ended.discard(record.job_id)
        if not last and now < self._collected.get(record.job_id, -1e9) + pause:
            return
        first = record.job_id not in self._collected
        account = self._account(record)
        if record.end is None and record.job_id not in self._last:
            self.status([record])
        platform, known = self.platform(account), attempts.Known.of(record.job_dir)
        if record.end is not None and not known.tasks:
            known.meet(attempts.tasks_of([record], platform))
        try:
            if first and (error_text := self._task_lists.get(account, _TaskList()).error_text):
                raise ClusterJobError(error_text)
            for attempt, task_id in enumerate(known.tasks):
                if task_id in known.started and task_id not in known.collected:
                    self._logs.collect(
                        record.job_dir,
                        platform,
                        task_id=task_id,
                        attempt=attempt,
                        instances=platform.instances(task_id),
                    )
                    known.note_collected(task_id)
        except ClusterJobError:
            if first:
                raise
        self._collected[record.job_id] = time.monotonic()

    def fetch(self, record: Record, *_: Any) -> NoReturn:
        """Raise an error: the platform's disks are not accessible from this machine.

        Raises:
            ClusterJobError: always.
        """
        raise ClusterJobError(
            f"job {record.job_id} ran on machines whose disks cannot be reached from here",
            "let the program write its results to one of the task's storages",
        )

    # -- cancelling --------------------------------------------------------------------------------

    def cancel(self, records: Sequence[Record]) -> None:
        """Cancel jobs on the platform.

        If the platform starts another attempt later, the next status request cancels it.

        Raises:
            ClusterJobError: the platform does not answer, or refuses to cancel.
        """
        for record in records:
            shared.request_cancel(record)
        for account, group in self._by_account(records).items():
            platform = self.platform(account)
            tasks = attempts.tasks_of(group, platform)
            self._task_lists.pop(account, None)
            in_parallel(platform.cancel, [task.id for task in tasks if not task.state.final])
