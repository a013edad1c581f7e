"""Leave the process group when a worker ends, and report an uncaught exception at once."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from clusterjob.node import program
from clusterjob.node.workers import report
from clusterjob.worker import process
from clusterjob.worker.context import Context


@dataclass
class ProcessState:
    """State of this process between `init` and its end.

    Attributes:
        context: the context that `init` returned; None after the end of the context.
        timeout: the timeout that `init` was given, in seconds.
        rounds: number of process groups that were made in this process.
        pid: pid of the process that called `init`. A forked child inherits this state and must
            not use it.
        watched: whether `watch` has installed its hooks.
        await_peers: waits until all ranks have the group.
        abandoned: whether threads of an abandoned group may still run.
    """

    context: Context | None = None
    timeout: float | None = None
    rounds: int = 0
    pid: int = 0
    watched: bool = False
    await_peers: Callable[[], None] | None = None
    abandoned: bool = False


state = ProcessState()


def leave(*, failed: bool) -> None:
    """Leave the process group that this process made, and drop the context, if there is one.

    Args:
        failed: whether this process ends in the middle of its work and must not wait for other
            processes.
    """
    context, state.context = state.context, None
    await_peers, state.await_peers = state.await_peers, None
    if context is not None and os.getpid() == state.pid:
        if await_peers is not None and not failed:
            await_peers()
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
        own = os.getpid() == state.pid and threading.current_thread() is threading.main_thread()
        if own and report_fd is not None:
            report.report(
                report_fd,
                local_rank,
                message=program.summary(error),
                exit_code=130 if kind is KeyboardInterrupt else 1,
                kind=program.failure_kind(error),
                where=program.place(error),
            )
        previous(kind, error, trace)
        if own and not process.is_interactive():
            leave(failed=True)
            # After a KeyboardInterrupt the interpreter itself ends the process, by SIGINT.
            if state.abandoned and kind is not KeyboardInterrupt:
                process.end_process(1)

    sys.excepthook = hook
