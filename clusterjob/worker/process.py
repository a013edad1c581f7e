"""Report to the agent from a worker, and end a worker process without SIGABRT."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from clusterjob.node import contract
from clusterjob.node.workers import torch_patches


def is_worker() -> bool:
    """Return whether an agent has started this process; False in a worker's children."""
    return os.environ.get(contract.REPORT_FD, "").rpartition(":")[2] == str(os.getpid())


def report(type_: str, **fields: Any) -> None:
    """Write a message to the agent that has started this process; do nothing without one.

    Args:
        type_: the name of the message, see `clusterjob.node.workers.forkserver_messages`.
        **fields: its fields without the local rank.
    """
    if is_worker():
        torch_patches.send(type_, **fields)


def end_process(exit_code: int) -> None:
    """Exit like the interpreter, but skip its finalisation.

    Threads of an abandoned group still hold tensors. A thread that releases a tensor during
    finalisation aborts the process with SIGABRT ("terminate called without an active exception"),
    which then hides the real failure (pytorch#179291; with torch 2.13 in 1 of 15 runs).
    """
    atexit.unregister(end_process)  # this call may itself be an exit function
    try:
        getattr(threading, "_shutdown", lambda: None)()  # waits for the non-daemon threads
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        ctypes.CDLL(None).fflush(None)  # output of C libraries, such as NCCL's log
    finally:
        os._exit(exit_code)


def call_within(seconds: float, function: Callable[[], None], device: Any) -> bool:
    """Call a function on a daemon thread, and return whether it ended in time.

    Args:
        seconds: maximum time to wait for its end.
        function: the function; it may leave a process group.
        device: the torch device of this process: a new thread's current device is cuda:0.
    """

    def call() -> None:
        if device.type != "cpu":
            import torch

            getattr(torch, device.type).set_device(device)
        function()

    thread = threading.Thread(target=call, daemon=True, name="clusterjob-leave")
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def keep_for_ever(groups: list[Any]) -> None:
    """Prevent the destructors of these groups from running, also when the interpreter exits."""
    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
