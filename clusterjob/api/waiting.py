"""Wait for jobs, in a thread or on an event loop, with one poll for all of them."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Iterator, Sequence

from clusterjob.backends.base import Status
from clusterjob.core import polling
from clusterjob.core.records import Record
from clusterjob.node.verdict import Verdict

_FIRST_PAUSE, _MAX_PAUSE = 0.02, 1.0  # first and maximum seconds between two polls
BACKENDS = threading.RLock()  # a backend is used by one thread at a time
_Pairs = list[tuple[Record, Status]]


def statuses(records: Sequence[Record], timeout: float | None = None) -> _Pairs:
    """Return the status of each job, with one query to each backend.

    Args:
        records: the jobs.
        timeout: seconds to wait for slow hosts; None for no limit of its own.

    Raises:
        TimeoutError: the hosts have not answered within the timeout.
    """
    if timeout is None:
        return _locked(records)
    found: list[_Pairs | BaseException] = []

    def ask() -> None:
        try:
            found.append(_locked(records))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(max(timeout, 0.05))
    if not found:
        raise TimeoutError
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def _locked(records: Sequence[Record]) -> _Pairs:
    with BACKENDS:
        return polling.statuses(records)


def ends(records: Sequence[Record], timeout: float | None) -> Iterator[tuple[Record, Verdict]]:
    """Yield each job with its verdict when it has ended.

    Args:
        records: the jobs, which continue when this function ends early.
        timeout: maximum seconds from the first step; None to wait for ever.

    Raises:
        TimeoutError: some jobs have not ended within the timeout.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    open_, last, pause = list(records), "", _FIRST_PAUSE
    while open_:
        left = None if deadline is None else deadline - time.monotonic()
        try:
            pairs = statuses(open_, left)
        except TimeoutError:
            raise _late(open_, timeout, last or "its hosts do not answer") from None
        ended = [(record, now.verdict) for record, now in pairs if now.verdict is not None]
        running = [(record, now) for record, now in pairs if now.verdict is None]
        yield from ended
        open_ = [record for record, _ in running]
        if running:
            now = running[0][1]
            last = f"{now.state}{f': {now.reason}' if now.reason else ''}"
            pause = _FIRST_PAUSE if ended else min(_MAX_PAUSE, pause * 1.3)
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise _late(open_, timeout, last)
            time.sleep(pause if left is None else min(pause, left))


def _late(open_: Sequence[Record], timeout: float | None, state: str) -> TimeoutError:
    more = f" and {len(open_) - 1} more have" if len(open_) > 1 else " has"
    return TimeoutError(f"job {open_[0].job_id}{more} not ended after {timeout:g} s ({state})")


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
        pause = _FIRST_PAUSE
        while self._waiting:
            records = {record.job_id: record for record, _ in self._waiting}
            ended: dict[str, Verdict] = {}
            failed: Exception | None = None
            try:
                pairs = await asyncio.to_thread(statuses, list(records.values()))
                ended = {one.job_id: now.verdict for one, now in pairs if now.verdict is not None}
            except Exception as error:
                failed = error
            for record, future in self._waiting:
                if future.done() or record.job_id not in records:
                    continue
                if failed is not None:
                    future.set_exception(failed)
                elif record.job_id in ended:
                    future.set_result(ended[record.job_id])
            self._waiting = [pair for pair in self._waiting if not pair[1].done()]
            pause = _FIRST_PAUSE if ended else min(_MAX_PAUSE, pause * 1.3)
            if self._waiting:
                await asyncio.sleep(pause)


_pollers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Poller] = (
    weakref.WeakKeyDictionary()
)


async def end(record: Record) -> Verdict:
    """Wait for a job on the running event loop; all waiting tasks share one poll."""
    loop = asyncio.get_running_loop()
    return await _pollers.setdefault(loop, _Poller()).wait(record)
