"""Wait for jobs on an event loop, with one poll for all tasks that wait.

Only this module of the API imports asyncio, which takes 30 ms.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from clusterjob.api import results
from clusterjob.api.waiting import FIRST_PAUSE, MAX_PAUSE, statuses
from clusterjob.core.records import Record
from clusterjob.node.verdict import Verdict

if TYPE_CHECKING:
    from clusterjob.api.jobs import Job

T = TypeVar("T")


async def result(job: Job[T]) -> T:
    """Wait for a job to end and return what `Job.result` returns."""
    record = job._record()
    verdict = await _end(record)
    value: T = await asyncio.to_thread(results.value, record, verdict, trust=job.trust_results)
    return value


async def every_result(jobs: Sequence[Job[T]]) -> list[T]:
    """Wait for all jobs to end and return their results."""
    return list(await asyncio.gather(*(result(job) for job in jobs)))


class _Poller:
    """Polls the jobs that tasks of one event loop wait for."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Record, asyncio.Future[Verdict]]] = []
        self._task: asyncio.Task[None] | None = None

    def wait(self, record: Record) -> asyncio.Future[Verdict]:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((record, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return future

    async def _run(self) -> None:
        pause = FIRST_PAUSE
        while self._waiting:
            records = {record.job_id: record for record, _ in self._waiting}
            ended: dict[str, Verdict | Exception] = {}
            try:
                pairs = await asyncio.to_thread(statuses, list(records.values()))
                ended |= {one.job_id: now.verdict for one, now in pairs if now.verdict is not None}
            except Exception as error:
                ended |= dict.fromkeys(records, error)
            for record, future in self._waiting:
                end = ended.get(record.job_id)
                if end is None or future.done():
                    continue
                if isinstance(end, Exception):
                    future.set_exception(end)
                else:
                    future.set_result(end)
            self._waiting = [pair for pair in self._waiting if not pair[1].done()]
            pause = FIRST_PAUSE if ended else min(MAX_PAUSE, pause * 1.3)
            if self._waiting:
                await asyncio.sleep(pause)


_pollers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Poller] = (
    weakref.WeakKeyDictionary()
)


async def _end(record: Record) -> Verdict:
    loop = asyncio.get_running_loop()
    return await _pollers.setdefault(loop, _Poller()).wait(record)
