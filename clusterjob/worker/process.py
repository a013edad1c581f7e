"""A worker process as its agent and its interpreter know it: the pipe for its own words, and an end
that cannot abort.
"""

from __future__ import annotations

import atexit
import os
import sys

# Not typing's: importing that costs as much as the rest of this module. Type checkers take the name
# for theirs.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def report_pipe() -> int | None:
    """Return the descriptor on which our agent hears of failures; None under other launchers, and
    in a worker's children.
    """
    import stat

    # The hook, in a process in trouble, has to find `program` and `report` loaded.
    from clusterjob.node import contract, program  # noqa: F401
    from clusterjob.node.workers import report  # noqa: F401

    descriptor, _, pid = os.environ.get(contract.REPORT_FD, "").partition(":")
    try:
        # A child inherits the variable, and under this number perhaps a file of its own.
        if pid != str(os.getpid()) or not stat.S_ISFIFO(os.fstat(int(descriptor)).st_mode):
            return None
        os.set_inheritable(int(descriptor), False)
    except (ValueError, OSError):
        return None
    return int(descriptor)


def ask_agents(local_rank: int) -> Callable[..., None]:
    """Return how our agents are asked after missing ranks; other launchers hear nothing."""
    descriptor = report_pipe()

    def ask(missing: list[int], *, final: bool) -> None:
        if descriptor is not None and missing:
            from clusterjob.node.workers import report

            report.ask(descriptor, local_rank, missing=missing, final=final)

    return ask


def is_interactive() -> bool:
    """Return whether somebody goes on typing after an uncaught exception."""
    return bool(sys.flags.interactive) or hasattr(sys, "ps1")


def end_process(exit_code: int) -> None:
    """End as the interpreter would, but for the taking apart of its modules.

    Threads of an abandoned group still hold tensors. One that lets go of a tensor while the
    interpreter is being taken apart brings the process down by SIGABRT ("terminate called without
    an active exception"), which then hides the failure itself (pytorch#179291; with torch 2.13 in 1
    of 15 runs).
    """
    import ctypes
    import threading

    try:
        getattr(threading, "_shutdown", lambda: None)()  # waits for the threads that are no daemons
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        ctypes.CDLL(None).fflush(None)  # what C libraries have printed, such as NCCL's log
    finally:
        os._exit(exit_code)
