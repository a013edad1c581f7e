"""A platform with a submit command as a backend: submitted once, all attempts known by one name,
logs and verdict out of its logs.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from clusterjob.backends import shared
from clusterjob.backends.base import Status
from clusterjob.backends.batch_command import attempts, upload
from clusterjob.backends.batch_command.attempts import Known, Retries, Seen
from clusterjob.backends.batch_command.log_stream import Stream
from clusterjob.backends.batch_command.platform import Instance, Platform, Task
from clusterjob.core.plans import Plan, secrets_file, token_file
from clusterjob.core.records import Handle, Record
from clusterjob.errors import ClusterJobError, SubmitError, SubmitInDoubtError
from clusterjob.node.logs import ends
from clusterjob.node.system import files
from clusterjob.node.verdict import JobState, Verdict

Account = tuple[tuple[str, str], ...]  # variables that choose one, sorted

_PRIVATE = "task.private"  # a task with its secrets, while the platform's command reads it
_LOOKS, _PAUSE = (
    3,
    1.0,
)  # for a task of which nobody knows whether the platform took it; seconds between two
_AT_ONCE = 8  # questions to a platform
_MOST_DETAILS = 8  # waiting jobs of one question whose workers are asked why
_LINES, _MOST_LINES = 500, 128_000  # of a worker's log: asked for first, and at most


@dataclass
class _Look:
    """What the newest question about an account's tasks brought."""

    at: float = -1e9  # monotonic seconds
    names: frozenset[str] = frozenset()
    tasks: Mapping[str, list[Task]] = field(default_factory=dict)
    trouble: str = ""


class PlatformBackend(ABC):
    """Runs jobs on a platform that shares no disk with the submitter."""

    NAME: ClassVar[str]

    def __init__(self) -> None:
        self._looks: dict[Account, _Look] = {}
        self._last: dict[str, Status] = {}
        self._collected: dict[str, float] = {}
        self._whole: set[str] = (
            set()
        )  # jobs whose end was seen, and whose logs are to be brought once more
        self._lines: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()

    # -- what a platform's own backend says --------------------------------------------------------------------------------

    @abstractmethod
    def plan(self, spec: Any) -> Plan:
        """Return what submitting the job would do; see `clusterjob.backends.base.Backend`."""

    @abstractmethod
    def submit(self, plan: Plan) -> Handle:
        """Start what was planned; see `clusterjob.backends.base.Backend`."""

    @abstractmethod
    def platform(self, account: Account) -> Platform:
        """Return the platform as one account sees it."""

    @abstractmethod
    def account_of(self, options: Mapping[str, str]) -> Account:
        """Return the account that a job's options, and the environment, choose."""

    @abstractmethod
    def retries(self, spec: Mapping[str, Any]) -> Retries:
        """Return when the platform starts a job's task again; the job as its record has it."""

    @abstractmethod
    def poll(self, options: Mapping[str, str]) -> float:
        """Return the seconds between two questions while a job is followed."""

    # -- submitting ----------------------------------------------------------------------------------------------------------

    def submit_tasks(
        self,
        plan: Plan,
        platform: Platform,
        tasks: Sequence[tuple[str, bytes]],
        suffix: str,
        rate: float,
    ) -> Handle:
        """Submit tasks one after the other, each once; an error or Ctrl-C cancels those that were
        taken.

        Args:
            plan: the job.
            platform: who takes them.
            tasks: the name of each, and the file that describes it, secrets and all.
            suffix: what the file's name ends with.
            rate: tasks a second, at most.

        Raises:
            SubmitError: the platform refuses one.
            SubmitInDoubtError: nobody knows whether it has taken one.
        """
        path = plan.job_dir / f"{_PRIVATE}{suffix}"
        at = time.time()
        ids: list[str] = []
        try:
            for name, data in tasks:
                begin = time.monotonic()
                files.write_atomic(path, data, mode=0o600)
                ids.append(_submit_once(platform, path, name=name, since=at))
                if len(ids) < len(tasks):
                    time.sleep(max(0.0, begin + 1 / rate - time.monotonic()))
        except OSError as error:
            _take_back(platform, ids)
            raise SubmitError(f"{path} cannot be written: {error.strerror}") from error
        except SubmitInDoubtError:
            if len(tasks) > 1:  # no array with holes: the one in doubt is cancelled when it is seen
                ends.cancel(plan.job_dir)
                _take_back(platform, ids)
            raise
        except SubmitError:
            _take_back(platform, ids)
            raise
        except KeyboardInterrupt:  # the command may have been quicker
            ends.cancel(plan.job_dir)
            with contextlib.suppress(ClusterJobError):
                ids += [
                    task.id
                    for task in platform.tasks([name for name, _ in tasks], at)
                    if not task.state.final and task.id not in ids
                ]
            _take_back(platform, ids)
            raise
        finally:
            path.unlink(missing_ok=True)
        for path in (token_file(plan.job_dir), secrets_file(plan.job_dir)):
            path.unlink(missing_ok=True)  # the platform has them, and nobody here needs them
        names = [plan.job_id] if plan.array else ids
        return Handle(
            self.NAME,
            names[0],
            data={"ids": names, "account": dict(self.account_of(plan.spec.options)), "at": at},
        )

    def detach(self, handle: Handle) -> None:  # noqa: B027 - there is nothing to do, for any platform
        """Nothing to let go: a platform's task needs nobody."""

    # -- asking --------------------------------------------------------------------------------------------------------------

    def status(self, records: Sequence[Record]) -> dict[str, Status]:
        """Return how jobs stand: the tasks of all of an account's jobs with one question, then what
        only their logs tell.
        """
        found: dict[str, Status] = {}
        groups: dict[Account, list[Record]] = {}
        for record in records:
            groups.setdefault(self._account(record), []).append(record)
        for account, group in groups.items():
            look, fresh = self._look(account, group)
            if not fresh and all(record.job_id in self._last for record in group):
                found |= {record.job_id: self._last[record.job_id] for record in group}
                continue
            platform = self.platform(account)
            detailed = {
                record.job_id
                for record in [record for record in group if _waits(look, record)][:_MOST_DETAILS]
            }

            def stand(
                record: Record,
                look: _Look = look,
                platform: Platform = platform,
                detailed: set[str] = detailed,
            ) -> Status:
                return self._standing(
                    record, look, platform=platform, detailed=record.job_id in detailed
                )

            statuses = _all_at_once(stand, group)
            found |= {record.job_id: status for record, status in zip(group, statuses, strict=True)}
        with self._lock:
            self._last |= found
            self._whole |= {
                job_id for job_id, status in found.items() if status.verdict is not None
            }
        return found

    def _account(self, record: Record) -> Account:
        if record.handle is not None:
            return tuple(
                sorted(
                    (str(key), str(value))
                    for key, value in record.handle.data.get("account", {}).items()
                )
            )
        return self.account_of(record.spec.get("options", {}))

    def _look(self, account: Account, records: Sequence[Record]) -> tuple[_Look, bool]:
        """Return the account's tasks, and whether they are news."""
        names = frozenset(record.job_id for record in records)
        pause = min(self.poll(record.spec.get("options", {})) for record in records)
        look = self._looks.get(account, _Look())
        if time.monotonic() < look.at + pause and names <= look.names:
            return look, False
        by_name: dict[str, list[Task]] = {}
        trouble = ""
        try:
            for task in self.platform(account).tasks(
                sorted(names), min(attempts.submitted_at(record) for record in records)
            ):
                by_name.setdefault(task.name, []).append(task)
        except ClusterJobError as error:
            trouble, by_name = error.message, dict(look.tasks)
        self._looks[account] = look = _Look(time.monotonic(), names, tasks=by_name, trouble=trouble)
        return look, True

    def _standing(
        self, record: Record, look: _Look, platform: Platform, *, detailed: bool
    ) -> Status:
        """Return how one job stands."""
        known = Known.of(record.job_dir)
        seen = known.meet(look.tasks.get(record.job_id, []))
        if look.trouble or seen is None:
            return self._unseen(record, known, seen=seen, trouble=look.trouble)
        wished = attempts.wished_to_end(record)
        handle = None
        if record.handle is None and not attempts.being_submitted(record):
            _sweep(record)
            handle = self._adopted(record, seen)
        common: dict[str, Any] = {
            "started_at": seen.task.started_at,
            "restarts": seen.attempt,
            "handle": handle,
        }
        try:
            if not seen.ended:
                if wished and seen.task.words != "Killing":
                    platform.cancel(seen.task.id)
                reason = (
                    "it is being cancelled"
                    if wished
                    else self._why_it_waits(platform, seen)
                    if detailed
                    else attempts.waits(seen.task)
                )
                state = (
                    JobState.RUNNING if seen.task.state is JobState.RUNNING else JobState.PENDING
                )
                return Status(
                    state, reason if state is JobState.PENDING or wished else "", **common
                )
            verdict = self._verdict(record, known, seen=seen, platform=platform, wished=wished)
        except ClusterJobError as error:
            return Status(JobState.UNKNOWN, error.message, **common)
        retries = self.retries(record.spec)
        if verdict is None:
            text = f"the platform says {seen.task.words}; the rest of its log is awaited"
            return Status(JobState.RUNNING, text, **common)
        if (
            not wished
            and verdict.state is not JobState.SUCCEEDED
            and known.comes_again(seen, retries)
        ):
            of = f" of {retries.times + 1}" if seen.attempt < retries.times else ""
            again = f"the platform starts it again (attempt {seen.attempt + 2}{of}); it was {verdict.state.value.lower()}"
            return Status(
                JobState.PENDING,
                f"{again}: {verdict.reason}" if verdict.reason else again,
                **common,
            )
        return Status(
            verdict.state,
            verdict.reason,
            verdict=verdict,
            started_at=verdict.started_at,
            restarts=seen.attempt,
            handle=handle,
        )

    def _unseen(self, record: Record, known: Known, seen: Seen | None, trouble: str) -> Status:
        common: dict[str, Any] = (
            {"started_at": seen.task.started_at, "restarts": seen.attempt}
            if seen is not None
            else {}
        )
        if record.handle is None and attempts.being_submitted(record):
            return Status(JobState.PENDING, "it is being submitted")
        if trouble:
            last = f" (it was {seen.task.words})" if seen is not None else ""
            return Status(JobState.UNKNOWN, f"{trouble}{last}", **common)
        _sweep(record)
        why = known.lost(record)
        wished = attempts.wished_to_end(record)
        if why is None:
            state = JobState.UNKNOWN if known.tasks or record.handle is None else JobState.PENDING
            return Status(
                state,
                f"{'it is being cancelled; ' if wished else ''}the platform does not show it (yet)",
            )
        if wished:
            shared.wish_to_cancel(
                record
            )  # an element's own wish, where all of its array was to end
        return shared.ended(
            shared.end_without_lead(
                record.job_dir, None, restarts=max(0, len(known.tasks) - 1), otherwise=why
            )
        )

    def _adopted(self, record: Record, seen: Seen) -> Handle:
        """Return the handle of a job whose submitter could not note it."""
        first = seen.first if record.index is None else record.whole_id
        data = {
            "ids": [first],
            "account": dict(self._account(record)),
            "at": attempts.submitted_at(record),
        }
        return Handle(self.NAME, first if record.index is None else record.job_id, data=data)

    @staticmethod
    def _why_it_waits(platform: Platform, seen: Seen) -> str:
        reasons = dict.fromkeys(
            instance.reason for instance in platform.instances(seen.task.id) if instance.reason
        )
        return "; ".join([attempts.waits(seen.task), *reasons])

    def _verdict(
        self, record: Record, known: Known, seen: Seen, platform: Platform, *, wished: bool
    ) -> Verdict | None:
        """Return how an attempt has ended; None while its log may still tell."""
        stream = Stream(record.job_dir, 0, attempt=seen.attempt)
        ran = seen.task.id in known.started
        instances = platform.instances(seen.task.id) if ran else []
        if ran and stream.verdict is None:
            with contextlib.suppress(ClusterJobError):  # of one that was ended before it had a log
                self._collect_nodes(
                    record,
                    platform,
                    task_id=seen.task.id,
                    attempt=seen.attempt,
                    instances=[each for each in instances if each.node_rank == 0],
                )
        own = stream.verdict
        # Agents that were stopped by the platform know of no failure: it may be that of a node
        # which could not start its agent.
        if ran and (own is None or (own.state is JobState.CANCELLED and not wished)):
            with contextlib.suppress(ClusterJobError):
                self._collect_nodes(
                    record,
                    platform,
                    task_id=seen.task.id,
                    attempt=seen.attempt,
                    instances=[each for each in instances if each.node_rank != 0],
                )
            own = attempts.refused(record.job_dir, seen) or own
            if own is None and not known.log_is_whole(seen):
                return None
        return attempts.verdict(
            seen, own, instances=instances, retries=self.retries(record.spec), wished=wished
        )

    # -- logs ----------------------------------------------------------------------------------------------------------------

    def collect(self, record: Record) -> None:
        """Bring the logs of all attempts, as far as they are written by now.

        Raises:
            ClusterJobError: the platform did not answer, and has not before.
        """
        pause, now = self.poll(record.spec.get("options", {})), time.monotonic()
        with self._lock:
            last = record.job_id in self._whole
            self._whole.discard(record.job_id)
        if not last and now < self._collected.get(record.job_id, -1e9) + pause:
            return
        first = record.job_id not in self._collected
        account = self._account(record)
        if record.end is None and record.job_id not in self._last:
            self.status([record])
        platform, known = self.platform(account), Known.of(record.job_dir)
        if record.end is not None and not known.tasks:
            known.meet(platform.tasks([record.job_id], attempts.submitted_at(record)))
        try:
            if first and (trouble := self._looks.get(account, _Look()).trouble):
                raise ClusterJobError(trouble)
            for attempt, task_id in enumerate(known.tasks):
                if task_id in known.started and task_id not in known.collected:
                    self._collect_nodes(
                        record,
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

    def _collect_nodes(
        self,
        record: Record,
        platform: Platform,
        task_id: str,
        attempt: int,
        instances: Sequence[Instance],
    ) -> None:
        def collect(instance: Instance) -> None:
            stream, key = (
                Stream(record.job_dir, instance.node_rank, attempt=attempt),
                (task_id, instance.node_rank),
            )
            count = self._lines.get(key, _LINES)
            while True:
                lines = platform.lines(task_id, instance.name, count)
                if len(lines) < count or stream.joins(lines) or count >= _MOST_LINES:
                    break
                count *= 4
            self._lines[key] = min(count, _MOST_LINES)
            stream.take(lines)

        _all_at_once(collect, instances)

    def fetch(self, record: Record, *_: Any) -> NoReturn:
        """Refuse: nothing of a platform's disks is reached from here.

        Raises:
            ClusterJobError: always.
        """
        raise ClusterJobError(
            f"there is nothing to fetch: job {record.job_id} ran on machines that are not reached from here",
            "have the program write its results to one of the task's storages",
        )

    # -- cancelling ------------------------------------------------------------------------------------------------------------

    def cancel(self, records: Sequence[Record]) -> None:
        """Have the platform stop jobs. One that it starts again later is cancelled when somebody
        next asks for it.

        Raises:
            ClusterJobError: the platform does not answer, or does not cancel.
        """
        groups: dict[Account, list[Record]] = {}
        for record in records:
            shared.wish_to_cancel(record)
            groups.setdefault(self._account(record), []).append(record)
        for account, group in groups.items():
            platform = self.platform(account)
            names = sorted(record.job_id for record in group)
            tasks = platform.tasks(names, min(attempts.submitted_at(record) for record in group))
            self._looks.pop(account, None)
            _all_at_once(platform.cancel, [task.id for task in tasks if not task.state.final])


def _all_at_once(work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Do the same with several, a few at a time; the first error is raised once all are done."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(_AT_ONCE, len(items))) as pool:
        return list(pool.map(work, items))


def _waits(look: _Look, record: Record) -> bool:
    tasks = look.tasks.get(record.job_id, [])
    return bool(tasks) and tasks[-1].state is JobState.PENDING


def _submit_once(platform: Platform, path: Path, name: str, since: float) -> str:
    """Submit one task; where the answer was no clear yes, look for it before anything else is said.

    Raises:
        SubmitError: the platform refuses it.
        SubmitInDoubtError: it does not answer, and the task is not to be seen yet.
    """
    try:
        return platform.submit(path)
    except SubmitError as error:
        in_doubt = isinstance(error, SubmitInDoubtError)
        for look in range(_LOOKS if in_doubt else 1):
            time.sleep(_PAUSE if look else 0.0)
            with contextlib.suppress(ClusterJobError):
                found = platform.tasks([name], since)
                if found:
                    return found[-1].id
        if not in_doubt:
            raise
        raise SubmitInDoubtError(
            f"nobody knows whether the platform has taken the job: {error.message}"
        ) from error


def _take_back(platform: Platform, ids: Sequence[str]) -> None:
    def cancel(task_id: str) -> None:
        with contextlib.suppress(ClusterJobError):
            platform.cancel(task_id)

    _all_at_once(cancel, ids)


def _sweep(record: Record) -> None:
    """Remove what a submitter that was killed has left of a job: what was to be sent, and the
    secrets.
    """
    if record.handle is None:
        place = (
            record.job_dir if record.index is None else record.job_dir.parent.parent
        )  # an array's elements are sent from one
        shutil.rmtree(place / upload.DIRECTORY, ignore_errors=True)
        for path in place.glob(
            f"*{_PRIVATE}*"
        ):  # or half of it, below the name that it has while it is written
            path.unlink(missing_ok=True)
