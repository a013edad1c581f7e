"""Wait for jobs, with one poll for all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

from clusterjob.backends.base import Status
from clusterjob.core import polling
from clusterjob.core.records import Record
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import Verdict

FIRST_PAUSE, MAX_PAUSE = 0.02, 1.0  # first and maximum seconds between two polls
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
    open_, last, pause = list(records), "", FIRST_PAUSE
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
            last = f"{now.state}{f': {sanitize(now.reason)}' if now.reason else ''}"
            pause = FIRST_PAUSE if ended else min(MAX_PAUSE, pause * 1.3)
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise _late(open_, timeout, last)
            time.sleep(pause if left is None else min(pause, left))


def _late(open_: Sequence[Record], timeout: float | None, state: str) -> TimeoutError:
    more = f" and {len(open_) - 1} more have" if len(open_) > 1 else " has"
    return TimeoutError(f"job {open_[0].job_id}{more} not ended after {timeout:g} s ({state})")
