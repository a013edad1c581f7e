"""Leave the process group when a worker ends, and report an uncaught exception at once."""

from __future__ import annotations

import atexit
import os
import sys

from clusterjob.worker import process, store

# Importing typing costs as much as the rest of this module; type checkers need only the name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

    from clusterjob.worker.context import Context


class ProcessState:
    """State of this process between `init` and its end.

    Attributes:
        context: the context that `init` returned, until it is left.
        timeout: the timeout that `init` was given, in seconds.
        rounds: number of process groups that were made in this process.
        pid: pid of the process that called `init`; a forked child inherits this state and must not
            use it.
        watched: whether `watch` has installed its hooks.
        hosted: on rank 0, the store that rank 0 itself serves, and its number of processes.
        abandoned: whether threads of an abandoned group may still run.
    """

    def __init__(self) -> None:
        self.context: Context | None = None
        self.timeout: float | None = None
        self.rounds = 0
        self.pid = 0
        self.watched = False
        self.hosted: tuple[Any, int] | None = None
        self.abandoned = False


state = ProcessState()


def leave(*, failed: bool) -> None:
    """Leave the process group that this process made, and drop the context, if there is one.

    Args:
        failed: whether this process ends in the middle of its work and must not wait for other
            processes.
    """
    context, state.context = state.context, None
    hosted, state.hosted = state.hosted, None
    if context is not None and os.getpid() == state.pid:
        if hosted is not None and not failed:
            store.await_joined(*hosted)
        state.abandoned |= context.close(failed=failed)


def watch(local_rank: int) -> None:
    """Leave the group at exit, and report an uncaught exception to the agent at once.

    A second call does nothing.

    Args:
        local_rank: local rank of this worker, for the report.
    """
    if state.watched:
        return
    state.watched = True
    atexit.register(leave, failed=False)
    previous = sys.excepthook
    report_fd = process.report_pipe()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        import threading

        own = os.getpid() == state.pid and threading.current_thread() is threading.main_thread()
        if own and report_fd is not None:
            from clusterjob.node import program
            from clusterjob.node.workers import report

            report.report(
                report_fd,
                local_rank,
                message=program.summary(error),
                exit_code=130 if kind is KeyboardInterrupt else 1,
                kind=program.failure_kind(error),
            )
        previous(kind, error, trace)
        if own and not process.is_interactive():
            leave(failed=True)
            if (
                state.abandoned and kind is not KeyboardInterrupt
            ):  # the interpreter ends a KeyboardInterrupt by SIGINT
                process.end_process(1)

    sys.excepthook = hook
