"""Detect unhandled errors in callbacks, tasks and threads, so that a broken agent ends."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from typing import Any


class Crashes:
    """Record the first unhandled error of an event loop or of a thread of this process.

    Attributes:
        first: a future that is done after the first error; its result is that error.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._of_loop)
        threading.excepthook = self._of_thread
        self.first: asyncio.Future[BaseException] = self._loop.create_future()
        self._tasks: set[asyncio.Task[Any]] = set()

    def watch(self, task: asyncio.Task[Any]) -> None:
        """Record the error of a background task, and keep the task until its end."""
        self._tasks.add(task)
        task.add_done_callback(self._of_task)

    def _of_loop(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Record the error of a callback.

        Other errors are those of one connection, which asyncio closes, of accept(2) without a free
        descriptor, which it repeats, and of a task that nobody waits for any more.
        """
        error = context.get("exception")
        if isinstance(error, BaseException) and "handle" in context:
            self._note(error)
        elif not isinstance(error, OSError):
            self._loop.default_exception_handler(context)

    def _of_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._note(error)

    def _of_thread(self, args: threading.ExceptHookArgs) -> None:
        error = args.exc_value or RuntimeError("a thread ended")
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._note, error)

    def _note(self, error: BaseException) -> None:
        if not self.first.done():
            self.first.set_result(error)


def summary(error: BaseException) -> str:
    """Return an error and its source line as one line, and print the traceback to stderr."""
    try:
        traceback.print_exception(error, file=sys.stderr)
    except OSError:
        pass  # stderr is closed, or no descriptor is left to open the source files
    frames = traceback.extract_tb(error.__traceback__)
    where = (
        f" ({frames[-1].name}, {frames[-1].filename.rpartition('/')[2]} line {frames[-1].lineno})"
        if frames
        else ""
    )
    return f"{type(error).__name__}: {error}{where}"
