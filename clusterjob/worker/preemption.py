"""Learn of a preemption: poll the warning, and call functions when it arrives.

The warning arrives in a pipe of the agent that started this process. Under another launcher it
is a file in the job's directory, which is polled once a second, or a signal of the scheduler.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from clusterjob.errors import UsageError
from clusterjob.node import contract
from clusterjob.node.environments import this_node
from clusterjob.node.logs import ends

_INTERVAL = 1.0  # seconds between two polls of the warning file
# Value of CLUSTERJOB_WARNING_FD without an agent: the scheduler signals each process of the job.
BY_SIGNALS = "none"
# The signal by which the waiting thread interrupts the main thread: libraries use the first ones.
_WAKE = signal.SIGRTMIN + 10 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _ask(pipe: int, seconds: float) -> tuple[bool, bool]:
    """Return whether a warning and whether a stop has arrived; wait up to `seconds` for one."""
    poll = select.poll()  # a new object per call: threads and signal handlers cannot share one
    poll.register(pipe, select.POLLIN)
    events = sum(event for _, event in poll.poll(seconds * 1000))
    return bool(events & select.POLLIN), bool(events & ~select.POLLIN)


class Watch:
    """The preemption warning of this process: its sources and its callbacks."""

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}  # those that `arm` has installed, by signal
        self._seen = self._calling = False
        self._next_poll = 0.0
        self._callbacks: list[Callable[[], object]] = []
        self._thread: threading.Thread | None = None  # waits for the warning
        self._pipe: int | None = None  # the agent's pipe, which is polled and never read
        descriptor, _, inode = os.environ.get(contract.WARNING_FD, "").partition(":")
        with contextlib.suppress(ValueError, OSError):
            # A child inherits the variable, but may have another file under this number.
            if os.fstat(int(descriptor)).st_ino == int(inode):
                self._pipe = int(descriptor)
        self._job_dir = Path(os.environ.get(contract.JOB_DIR) or os.devnull)

    def warned(self, pid: int) -> bool:
        """Return whether the warning has arrived; on the main thread, call the functions first.

        Args:
            pid: pid of the process that called `init`. Its children keep their signal handlers:
                SIGTERM ends them.
        """
        if os.getpid() == pid and _on_main_thread():
            self._arm()
        return self._poll()

    def call_when_warned(self, callback: Callable[[], object], pid: int) -> None:
        """Call a function on the main thread when the warning arrives, or now if it has arrived.

        Raises:
            UsageError: this is not the main thread of the process `pid`.
        """
        if os.getpid() != pid or not _on_main_thread():
            raise UsageError("on_preempt: only the main thread of the process that called init may")
        self._arm()
        self._callbacks.append(callback)
        if not self._poll() and self._thread is None:
            self._thread = threading.Thread(
                target=self._wait, daemon=True, name="clusterjob-warning"
            )
            self._thread.start()

    # -- sources of the warning ------------------------------------------------------------------

    def _arm(self) -> None:
        """Handle the scheduler's signals, unless the script handles them itself."""
        if self._handlers:
            return
        os.register_at_fork(after_in_child=self._disarm_child)
        # The agent and the job scripts make their children ignore SIGUSR1.
        self._handlers = {_WAKE: self._warned, signal.SIGUSR1: self._warned}
        if self._pipe is not None or os.environ.get(contract.WARNING_FD) == BY_SIGNALS:
            self._handlers[signal.SIGTERM] = self._terminated
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, handler)

    def _poll(self) -> bool:
        if self._pipe is not None:
            self._seen = self._seen or _ask(self._pipe, 0)[0]
        elif not self._seen and time.monotonic() >= self._next_poll:
            self._next_poll = time.monotonic() + _INTERVAL
            attempt = this_node.read_attempt(os.environ)
            self._seen = ends.warning_file(self._job_dir, attempt).exists()
        if self._seen and _on_main_thread():
            self._call()
        return self._seen

    # -- signals ---------------------------------------------------------------------------------

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        """Treat the first SIGTERM as the scheduler's warning; end the process at the second.

        While the workers are being stopped, the first SIGTERM ends the process too.
        """
        is_stopped = ends.cancelled(self._job_dir) if self._pipe is None else _ask(self._pipe, 0)[1]
        signal.signal(number, signal.SIG_DFL)
        if is_stopped:
            os.kill(os.getpid(), number)
        self._warned(number, frame)

    def _warned(self, _number: int, _frame: FrameType | None) -> None:
        self._seen = True
        self._call()

    def _disarm_child(self) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == handler:
                is_usr1 = number == signal.SIGUSR1  # the scheduler may send it to all processes
                signal.signal(number, signal.SIG_IGN if is_usr1 else signal.SIG_DFL)
        self._callbacks.clear()

    # -- callbacks -------------------------------------------------------------------------------

    def _call(self) -> None:
        if self._calling:
            return  # the running call continues with the remaining callbacks
        self._calling = True
        try:
            while self._callbacks:
                self._callbacks.pop(0)()
        finally:
            self._calling = False

    def _wait(self) -> None:
        """Wait for the warning on a thread, then interrupt the main thread with a signal.

        Nothing but a signal interrupts a blocking system call of the main thread.
        """
        while not self._poll():
            if self._pipe is None:
                time.sleep(_INTERVAL)
            elif _ask(self._pipe, _INTERVAL) == (False, True):
                return
        signal.pthread_kill(threading.main_thread().ident or 0, _WAKE)


# Not made at the import: the forkserver imports this module for its workers.
watch = functools.cache(Watch)
