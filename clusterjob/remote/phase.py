"""A time limit for one phase of a connection; it closes the connection."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from clusterjob.errors import HostError


class Phase:
    """Context manager that closes the connection if a phase takes too long.

    paramiko waits for some answers without a timeout.

    Args:
        close: closes the connection.
        seconds: the time limit.
        label: the host, for the error.
        what: the error, without the time.

    Raises:
        HostError: at the end of the block, if the phase took longer than `seconds`.
    """

    def __init__(self, close: Callable[[], None], seconds: float, label: str, what: str) -> None:
        self._close = close
        self._seconds = seconds
        self._error = HostError(label, f"{what} within {seconds:g} s")
        self._expired = threading.Event()
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Phase:
        self._begin()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._cancel()
        if self._expired.is_set() and (error is None or isinstance(error, Exception)):
            raise self._error from error

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Stop the clock, while a human answers; it starts anew afterwards."""
        self._cancel()
        try:
            yield
        finally:
            self._begin()

    def _begin(self) -> None:
        self._timer = threading.Timer(self._seconds, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        self._expired.set()
        self._close()
