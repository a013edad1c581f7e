"""The end of a worker process: what it has to leave is remembered from `init` on, and an uncaught
exception is told at once.
"""

from __future__ import annotations

import atexit
import os
import sys

from clusterjob.worker import process, store

# Not typing's: importing that costs as much as the rest of this module. Type checkers take the name
# for theirs.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

    from clusterjob.worker.context import Context


class Remembered:
    """What is remembered of the process in which this runs.

    Attributes:
        context: what `init` has returned, until it is left.
        timeout: what `init` was given, in seconds.
        rounds: process groups that were made here.
        pid: of the process that called `init`: a forked child inherits the rest, and none of it is
            its own.
        watched: whether the ends of this process are looked after.
        hosted: rank 0's: a store that it serves itself, and for how many processes.
        abandoned: whether threads of a group that was left in the middle still run.
    """

    def __init__(self) -> None:
        self.context: Context | None = None
        self.timeout: float | None = None
        self.rounds = 0
        self.pid = 0
        self.watched = False
        self.hosted: tuple[Any, int] | None = None
        self.abandoned = False


remembered = Remembered()


def leave(*, failed: bool) -> None:
    """Leave the process group that was made here and forget the context; nothing where there is
    none.

    Args:
        failed: whether this process ends in the middle of its work, so that nobody may be waited
            for.
    """
    context, remembered.context = remembered.context, None
    hosted, remembered.hosted = remembered.hosted, None
    if context is not None and os.getpid() == remembered.pid:
        if hosted is not None and not failed:
            store.await_joined(*hosted)
        remembered.abandoned |= context.close(failed=failed)


def watch(local_rank: int) -> None:
    """Have the group left at the end of the process, and an uncaught exception reported the moment
    it happens. Once is enough.

    Args:
        local_rank: the worker that the launcher is told of.
    """
    if remembered.watched:
        return
    remembered.watched = True
    atexit.register(leave, failed=False)
    previous = sys.excepthook
    report_fd = process.report_pipe()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        import threading

        own = (
            os.getpid() == remembered.pid and threading.current_thread() is threading.main_thread()
        )
        if own and report_fd is not None:
            from clusterjob.node import program
            from clusterjob.node.workers import report

            report.report(
                report_fd,
                local_rank,
                message=program.summary(error),
                exit_code=130 if kind is KeyboardInterrupt else 1,
            )
        previous(kind, error, trace)
        if own and not process.is_interactive():
            leave(failed=True)
            if (
                remembered.abandoned and kind is not KeyboardInterrupt
            ):  # that one ends by its signal
                process.end_process(1)

    sys.excepthook = hook
