"""Access the agent's report pipe from a worker, and end a worker process without SIGABRT."""

from __future__ import annotations

import atexit
import os
import sys

# Importing typing costs as much as the rest of this module; type checkers need only the name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def report_pipe() -> int | None:
    """Return the descriptor of the pipe on which the agent receives failure reports.

    None under other launchers, and in a worker's children.
    """
    import stat

    # The exception hook runs in a failing process: import now the modules that it needs.
    from clusterjob.node import contract, program  # noqa: F401
    from clusterjob.node.workers import report  # noqa: F401

    descriptor, _, pid = os.environ.get(contract.REPORT_FD, "").partition(":")
    try:
        # A child inherits the variable, but may have another file under this number.
        if pid != str(os.getpid()) or not stat.S_ISFIFO(os.fstat(int(descriptor)).st_mode):
            return None
        os.set_inheritable(int(descriptor), False)
    except (ValueError, OSError):
        return None
    return int(descriptor)


def ask_agents(local_rank: int) -> Callable[..., None]:
    """Return a function that reports missing ranks to the agents; a no-op without agents."""
    descriptor = report_pipe()

    def ask(missing: list[int], *, final: bool) -> None:
        if descriptor is not None and missing:
            from clusterjob.node.workers import report

            report.report_missing(descriptor, local_rank, missing=missing, final=final)

    return ask


def is_interactive() -> bool:
    """Return whether the interpreter is interactive and continues after an uncaught exception."""
    return bool(sys.flags.interactive) or hasattr(sys, "ps1")


def end_process(exit_code: int) -> None:
    """Exit like the interpreter, but skip its finalisation.

    Threads of an abandoned group still hold tensors. A thread that releases a tensor during
    finalisation aborts the process with SIGABRT ("terminate called without an active exception"),
    which then hides the real failure (pytorch#179291; with torch 2.13 in 1 of 15 runs).
    """
    import ctypes
    import threading

    try:
        getattr(threading, "_shutdown", lambda: None)()  # waits for the non-daemon threads
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        ctypes.CDLL(None).fflush(None)  # output of C libraries, such as NCCL's log
    finally:
        os._exit(exit_code)
