"""Search lines of output for a regular expression, with a time limit."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Iterable, Iterator
from types import FrameType

from clusterjob.errors import UsageError
from clusterjob.node.logs.log_files import LogLine
from clusterjob.node.system.sanitize import sanitize

_TIMEOUT = 2.0  # seconds of CPU time for the lines of one batch
_SEARCHED = 1 << 16  # characters of a line that are searched


class LineSearch:
    """Select the lines that contain a match of a regular expression.

    Some expressions, such as (a+)+$, take exponential time. A search that exceeds its time limit
    ends with an error. Colours are ignored, and only the first 65,536 characters of a line are
    searched.

    Args:
        expression: the expression, in the syntax of Python's `re`.

    Raises:
        UsageError: the expression is not valid.
    """

    def __init__(self, expression: str) -> None:
        try:
            self._pattern = re.compile(expression)
        except (re.error, OverflowError, RecursionError) as error:
            raise UsageError(
                f"--grep {expression!r} is not a regular expression: {error}",
                "a backslash makes the next character literal",
            ) from error

    def matching(self, lines: Iterable[LogLine]) -> list[LogLine]:
        """Return the lines with a match.

        Raises:
            UsageError: the search takes too long.
        """
        with self._limited():
            return [line for line in lines if self._pattern.search(sanitize(line.text[:_SEARCHED]))]

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        """Interrupt the search after its time limit: `re` handles signals while it searches."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread handles signals
            return

        def stop(_number: int, _frame: FrameType | None) -> None:
            raise UsageError(
                f"--grep {self._pattern.pattern!r} takes more than {_TIMEOUT:g} s for some lines",
                "nested repetitions such as (a+)+ are slow; use a simpler expression",
            )

        before = signal.signal(signal.SIGVTALRM, stop)
        signal.setitimer(signal.ITIMER_VIRTUAL, _TIMEOUT)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
