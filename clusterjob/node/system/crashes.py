"""Hear of errors in callbacks, tasks and threads that nobody waits for: an agent must not live on
without a part of itself.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from typing import Any


class Crashes:
    """The first error of an event loop, or of a thread of this process, that no code handles.

    Attributes:
        first: done once there is one; its result is the error.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._of_loop)
        threading.excepthook = self._of_thread
        self.first: asyncio.Future[BaseException] = self._loop.create_future()

    def watch(self, task: asyncio.Task[Any]) -> None:
        """Hear of the error with which a task ends that runs as long as the agent."""
        task.add_done_callback(self._of_task)

    def _of_loop(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, BaseException):
            self._note(error)
        else:  # a warning of asyncio's
            self._loop.default_exception_handler(context)

    def _of_task(self, task: asyncio.Task[Any]) -> None:
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


def in_words(error: BaseException) -> str:
    """Return an error and where it arose as one line, and leave the traceback in this process's
    stderr.
    """
    try:
        traceback.print_exception(error, file=sys.stderr)
    except OSError:
        pass  # nobody reads it, or no descriptor is left for the source files
    frames = traceback.extract_tb(error.__traceback__)
    where = (
        f" ({frames[-1].name}, {frames[-1].filename.rpartition('/')[2]} line {frames[-1].lineno})"
        if frames
        else ""
    )
    return f"{type(error).__name__}: {error}{where}"
