"""The Python handles of jobs: `Job`, `JobGroup` and `as_completed`."""

from __future__ import annotations

import functools
import itertools
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, overload

from clusterjob.api import results, waiting
from clusterjob.core import job_parts, jobs, polling
from clusterjob.core.records import SEPARATOR, Record, Records
from clusterjob.errors import UsageError
from clusterjob.node.logs.log_files import LogLine, LogReader, fold
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import JobState, Verdict

T = TypeVar("T")
_POLL = 0.2  # seconds between two polls of a followed job


@dataclass(frozen=True)
class Job(Generic[T]):
    """A job that runs, or ran: a function's, or any job that `clusterjob submit` started.

    Ctrl-C in a method leaves the job running. ``await job`` waits on the running event loop and
    returns what `result` returns; cancelling the waiting task leaves the job running, too.

    Attributes:
        id: the job's id, which `clusterjob status`, `logs` and `cancel` accept.
        trust_results: whether to unpickle results that other machines have written; unpickling
            runs code that those machines choose.
    """

    id: str
    trust_results: bool = field(default=False, compare=False, repr=False)

    @classmethod
    def get(cls, job: str, *, trust_results: bool = False) -> Job[Any]:
        """Return a job that was submitted before, also by another process.

        Args:
            job: an id, the beginning of an id, ``@`` for the latest job, ``@2`` for the one before,
                or a job's name.
            trust_results: as the attribute.

        Raises:
            JobNotFound: there is no such job.
            UsageError: it is an array.
        """
        record = Records().find(job)
        if record.array is not None:
            raise UsageError(
                f"job {record.job_id} is an array of {len(record.array['indices'])} jobs",
                f"JobGroup.get({record.job_id!r}) returns them",
            )
        return Job(record.job_id, trust_results)

    def _record(self) -> Record:
        return _records([self.id])[0]

    @property
    def name(self) -> str:
        """The job's name."""
        return self._record().name

    @property
    def state(self) -> JobState:
        """The state of the job now."""
        return waiting.statuses([self._record()])[0][1].state

    def done(self) -> bool:
        """Return whether the job has ended."""
        return waiting.statuses([self._record()])[0][1].verdict is not None

    def wait(self, timeout: float | None = None) -> Verdict:
        """Wait for the job to end and return its verdict.

        Args:
            timeout: maximum seconds; None to wait for ever.

        Raises:
            TimeoutError: the job has not ended; it continues.
        """
        return next(waiting.ends([self._record()], timeout))[1]

    def result(self, timeout: float | None = None) -> T:
        """Wait for the job to end and return the function's value on rank 0.

        Args:
            timeout: maximum seconds; None to wait for ever.

        Raises:
            TimeoutError: the job has not ended; it continues.
            Exception: the function's exception on the rank that failed first, with that worker's
                traceback as its cause.
            RemoteError: that exception as text, if another machine has written it and
                `trust_results` is not set.
            JobCancelled: the job was cancelled.
            JobFailed: the job failed in another way: a worker was killed or a node was lost; or
                the value is no plain data and `trust_results` is not set.
            ClusterJobError: the job's host does not answer, or the job runs no function.
        """
        value: T = results.value(self._record(), self.wait(timeout), trust=self.trust_results)
        return value

    def results(self, timeout: float | None = None) -> list[T]:
        """Wait for the job to end and return the values of all ranks, in rank order.

        Raises the same exceptions as `result`.
        """
        return results.values(self._record(), self.wait(timeout), trust=self.trust_results)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the job to end and return the exception that `result` raises, or None.

        Raises:
            TimeoutError: the job has not ended; it continues.
            JobCancelled: the job was cancelled.
            ClusterJobError: the job's host does not answer, or the job runs no function.
        """
        error = results.exception(self._record(), self.wait(timeout), trust=self.trust_results)
        if isinstance(error, results.JobCancelled):
            raise error
        return error

    def __await__(self) -> Generator[Any, None, T]:
        from clusterjob.api import event_loop

        return event_loop.result(self).__await__()

    def cancel(self) -> bool:
        """Cancel the job; return False if it had already ended."""
        return _cancel([self._record()]) == 1

    def logs(
        self, *, rank: int | None = None, node: int | None = None, tail: int | None = None
    ) -> str:
        """Return the output so far; lines begin with their rank if there are several ranks.

        Args:
            rank: only the output of this worker.
            node: only the output of this node.
            tail: only the last lines, this many.

        Raises:
            UsageError: the job has no such rank or node.
        """
        record = self._record()
        with waiting.BACKENDS:
            polling.collect(record)
        reader = _reader(record, rank, node)
        if tail is not None:
            reader.skip_to_tail(tail)
        parts = fold(reader.batches(end=True))
        lines = [_line(record, *pair) for pair in itertools.chain.from_iterable(parts)]
        shown = lines if tail is None else lines[-tail:] if tail > 0 else []
        return "".join(f"{line}\n" for line in shown)

    def follow(self, *, rank: int | None = None, node: int | None = None) -> Iterator[str]:
        """Yield the lines of output while the job writes them, until it ends."""
        record = self._record()
        reader = _reader(record, rank, node)
        while True:
            [(record, now)] = waiting.statuses([record])
            ended = now.verdict is not None
            with waiting.BACKENDS:
                polling.collect(record)
            for lines in fold(reader.batches(end=ended)):
                yield from itertools.starmap(functools.partial(_line, record), lines)
            if ended:
                return
            time.sleep(_POLL)

    def _repr_html_(self) -> str:
        from clusterjob.api import notebook

        return notebook.table([self.id])


@dataclass(frozen=True)
class JobGroup(Sequence[Job[T]]):
    """Jobs that belong together, such as those of `map`: a sequence of `Job`.

    ``await group`` waits on the running event loop and returns what `results` returns.

    Attributes:
        jobs: the jobs, in the order of their arguments.
    """

    jobs: tuple[Job[T], ...]

    @classmethod
    def get(cls, job: str, *, trust_results: bool = False) -> JobGroup[Any]:
        """Return the jobs of an array; the arguments are those of `Job.get`.

        Raises:
            JobNotFound: there is no such job.
        """
        records = Records()
        found = records.elements(records.find(job))
        return JobGroup(tuple(Job(record.job_id, trust_results) for record in found))

    def __len__(self) -> int:
        return len(self.jobs)

    @overload
    def __getitem__(self, index: int) -> Job[T]: ...
    @overload
    def __getitem__(self, index: slice) -> JobGroup[T]: ...
    def __getitem__(self, index: int | slice) -> Job[T] | JobGroup[T]:
        return JobGroup(self.jobs[index]) if isinstance(index, slice) else self.jobs[index]

    @property
    def ids(self) -> list[str]:
        """The ids of the jobs."""
        return [job.id for job in self.jobs]

    def states(self) -> Mapping[JobState, int]:
        """Return the number of jobs in each state."""
        return Counter(now.state for _, now in waiting.statuses(_records(self.ids)))

    def done(self) -> bool:
        """Return whether all jobs have ended."""
        return all(now.verdict is not None for _, now in waiting.statuses(_records(self.ids)))

    def wait(self, timeout: float | None = None) -> list[Verdict]:
        """Wait for all jobs to end and return their verdicts.

        Raises:
            TimeoutError: some jobs have not ended within the timeout in seconds; they continue.
        """
        ended = {record.job_id: end for record, end in self._ends(timeout)}
        return [ended[job.id] for job in self.jobs]

    def results(self, timeout: float | None = None) -> list[T]:
        """Wait for all jobs to end and return the value of each, on its rank 0.

        Raises:
            TimeoutError: some jobs have not ended within the timeout in seconds; they continue.
            Exception: the first failed job's exception, as `Job.result` raises it.
        """
        self.wait(timeout)
        return [job.result() for job in self.jobs]

    def as_completed(self, timeout: float | None = None) -> Iterator[Job[T]]:
        """Yield each job when it has ended; see `as_completed`."""
        known = {job.id: job for job in self.jobs}
        return (known[record.job_id] for record, _ in self._ends(timeout))

    def _ends(self, timeout: float | None) -> Iterator[tuple[Record, Verdict]]:
        return waiting.ends(_records(dict.fromkeys(self.ids)), timeout)

    def cancel(self) -> int:
        """Cancel the jobs; return how many had not ended."""
        return _cancel(_records(self.ids))

    def __await__(self) -> Generator[Any, None, list[T]]:
        from clusterjob.api import event_loop

        return event_loop.every_result(self.jobs).__await__()

    def _repr_html_(self) -> str:
        from clusterjob.api import notebook

        return notebook.table(self.ids)


def as_completed(jobs: Iterable[Job[T]], timeout: float | None = None) -> Iterator[Job[T]]:
    """Yield each job when it has ended, whichever ends first.

    Args:
        jobs: the jobs, such as a `JobGroup`.
        timeout: maximum seconds for all of them; None to wait for ever.

    Raises:
        TimeoutError: some jobs have not ended; they continue.
    """
    return JobGroup(tuple(jobs)).as_completed(timeout)


def _reader(record: Record, rank: int | None, node: int | None) -> LogReader:
    """Return a reader of the job's output."""
    job_parts.check_single(record, "output")
    job_parts.check_nodes(record, None if node is None else [node])
    job_parts.check_ranks(record, None if rank is None else [rank], job_parts.world_size(record))
    return LogReader(record.job_dir, rank=rank, node=node)


def _line(record: Record, label: str, line: LogLine) -> str:
    job = record.job
    one = job.working_nodes == 1 and job.nproc_per_node == 1 and not job.nproc_word
    return sanitize(line.text) if one else f"[{label}] {sanitize(line.text)}"


def _cancel(records: Sequence[Record]) -> int:
    with waiting.BACKENDS:
        return sum(cancelled for _, cancelled in jobs.cancel(records))


def _records(ids: Iterable[str]) -> list[Record]:
    """Return the records of jobs with these full ids, without listing all records."""
    records = Records()
    arrays: dict[str, Record] = {}
    found = []
    for job_id in ids:
        record = records.read(job_id)
        whole, _, index = job_id.rpartition(SEPARATOR)
        if record is None and whole and index.isdigit():
            if whole not in arrays:
                arrays[whole] = records.find(whole)
            record = arrays[whole].element(int(index))
        found.append(record or records.find(job_id))
    return found
