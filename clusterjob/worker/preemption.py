"""Warn a training script of a preemption, and let it exit so that the job is requeued.

The warning arrives in a pipe of the agent that started this process. Under another launcher it
is a file in the job's directory, which is polled once a second, or a signal of the scheduler.
`Context` inherits from `Preemptible`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from clusterjob.node import contract
from clusterjob.node.environments import scheduler
from clusterjob.node.logs import ends
from clusterjob.node.verdict import PREEMPTED_EXIT_CODE
from clusterjob.node.workers import report
from clusterjob.worker import process

_INTERVAL = 1.0  # seconds between two polls of the warning file
_LEAVING = 5.0  # timeout in seconds to leave a process group whose other members may have ended
_FIRST_SIGNAL = 10  # offset from SIGRTMIN: libraries use the first real-time signals
# Value of CLUSTERJOB_WARNING_FD without an agent: the scheduler signals each process of the job.
BY_SIGNALS = "none"


class Preemptible:
    """The preemption methods of a `Context`."""

    local_rank: int
    device: Any
    _leave: Callable[..., None]
    _pid: int

    @property
    def attempt(self) -> int:
        """Number of the job's attempt, from 0; a restart of the workers does not count."""
        return scheduler.read_attempt(os.environ)

    @property
    def preempted(self) -> bool:
        """Whether the job has a preemption warning; each call costs a few microseconds.

        Processes may see the warning at different steps. To leave at the same step they must agree:
        ``ctx.reduce(ctx.preempted, "max")``.
        """
        _watch.arm(self._pid)
        return _watch.poll()

    def on_preempt(self, callback: Callable[[], object]) -> None:
        """Call a function once when the preemption warning arrives.

        Functions are called in the order of registration. They run on the main thread as soon as
        that thread runs Python code, so a training step may be half done. An exception of a
        function is raised on that thread and may end the script. A function registered on another
        thread runs on a separate thread. A function registered after the warning runs at once.

        Args:
            callback: a function without arguments.
        """
        _watch.arm(self._pid)
        _watch.add(callback)

    def requeue(self) -> NoReturn:
        """Leave the process group and exit with code 75, so that the job is requeued.

        Every process calls it after the checkpoint is saved. A process that fails because a peer
        has left this way does not fail the job. Without a preemption warning, exit code 75 is an
        ordinary failure.

        Raises:
            SystemExit: always.
        """
        descriptor = process.report_pipe()
        if descriptor is not None:  # report first: peers may fail as soon as this process leaves
            report.report(
                descriptor,
                self.local_rank,
                message="left to be queued again",
                exit_code=PREEMPTED_EXIT_CODE,
                kind="preempted",
            )
        if not process.call_within(_LEAVING, lambda: self._leave(failed=False), device=self.device):
            atexit.register(process.end_process, PREEMPTED_EXIT_CODE)  # the group is stuck
        raise SystemExit(PREEMPTED_EXIT_CODE)


def _ask(pipe: int, seconds: float) -> tuple[bool, bool]:
    """Return whether a warning and whether a stop has arrived; wait up to `seconds` for one."""
    poll = select.poll()  # a new object per call: threads and signal handlers cannot share one
    poll.register(pipe, select.POLLIN)
    events = sum(event for _, event in poll.poll(seconds * 1000))
    return bool(events & select.POLLIN), bool(events & ~select.POLLIN)


class _Watch:
    """The preemption warning of this process: its sources and its callbacks."""

    def __init__(self) -> None:
        self._ready = False  # whether the sources of the warning are known
        self._armed = False
        self._seen = False
        self._terminated_once = False
        self._pipe: int | None = None  # the agent's pipe, which is polled and never read
        self._job_dir: Path | None = None
        self._next_poll = 0.0
        self._callbacks: list[Callable[[], object]] = []  # called on the main thread
        self._others: list[Callable[[], object]] = []  # called on the waiting thread
        self._calling = False
        self._call_number = 0  # the signal by which the waiting thread interrupts the main thread
        self._thread: threading.Thread | None = None

    # -- sources of the warning ------------------------------------------------------------------

    def arm(self, pid: int) -> None:
        """Find the sources of the warning, and handle the scheduler's signals.

        Args:
            pid: pid of the process that called `init`. Its children keep their signal handlers:
                SIGTERM ends them.
        """
        if not self._ready:
            self._find_sources()
        is_main_thread = threading.current_thread() is threading.main_thread()
        if self._armed or os.getpid() != pid or not is_main_thread:
            return
        self._armed = True
        os.register_at_fork(after_in_child=self._disarm_child)
        warns = self._pipe is not None or os.environ.get(contract.WARNING_FD) == BY_SIGNALS
        if warns and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminated)
        # The agent and the job scripts make their children ignore SIGUSR1.
        if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            signal.signal(signal.SIGUSR1, self._warned)

    def _find_sources(self) -> None:
        self._ready = True
        descriptor, _, inode = os.environ.get(contract.WARNING_FD, "").partition(":")
        with contextlib.suppress(ValueError, OSError):
            # A child inherits the variable, but may have another file under this number.
            if os.fstat(int(descriptor)).st_ino == int(inode):
                self._pipe = int(descriptor)
        job_dir = os.environ.get(contract.JOB_DIR)
        if job_dir and self._pipe is None:
            self._job_dir = Path(job_dir)

    def poll(self) -> bool:
        """Return whether the warning has arrived; on the main thread, call the callbacks first."""
        if not self._seen:
            self._seen = _ask(self._pipe, 0)[0] if self._pipe is not None else self._file_exists()
        is_main_thread = threading.current_thread() is threading.main_thread()
        if self._seen and self._callbacks and is_main_thread:
            self._call()
        return self._seen

    def _file_exists(self) -> bool:
        now = time.monotonic()
        if self._job_dir is None or now < self._next_poll:
            return False
        self._next_poll = now + _INTERVAL
        return ends.warning_file(self._job_dir, scheduler.read_attempt(os.environ)).exists()

    # -- signals ---------------------------------------------------------------------------------

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        """Treat the first SIGTERM as the scheduler's warning; end the process at the second.

        While the workers are being stopped, the first SIGTERM ends the process too.
        """
        if self._terminated_once or self._is_stopped():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._terminated_once = True
        self._warned(number, frame)

    def _is_stopped(self) -> bool:
        if self._pipe is not None:
            return _ask(self._pipe, 0)[1]
        return self._job_dir is not None and ends.cancelled(self._job_dir)

    def _warned(self, _number: int, _frame: FrameType | None) -> None:
        self._seen = True
        self._call()

    def _disarm_child(self) -> None:
        for number, ours, theirs in (
            (signal.SIGTERM, self._terminated, signal.SIG_DFL),
            (signal.SIGUSR1, self._warned, signal.SIG_IGN),
        ):
            if signal.getsignal(number) == ours:
                signal.signal(number, theirs)
        self._callbacks.clear()
        self._others.clear()

    # -- callbacks -------------------------------------------------------------------------------

    def add(self, callback: Callable[[], object]) -> None:
        """Call a function when the warning arrives, or now if it has already arrived."""
        if threading.current_thread() is threading.main_thread():
            self._callbacks.append(callback)
            self._call_number = self._call_number or self._free_signal()
        elif self.poll():
            callback()
            return
        else:
            self._others.append(callback)
        if not self.poll() and self._thread is None:
            self._thread = threading.Thread(
                target=self._wait, daemon=True, name="clusterjob-warning"
            )
            self._thread.start()

    def _free_signal(self) -> int:
        for number in range(signal.SIGRTMIN + _FIRST_SIGNAL, signal.SIGRTMAX + 1):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._warned)
                return number
        raise RuntimeError("every real-time signal has a handler already")

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
        while not self.poll():
            if self._pipe is None:
                time.sleep(_INTERVAL)
            elif _ask(self._pipe, _INTERVAL) == (False, True):
                return
        if self._callbacks and self._call_number:
            signal.pthread_kill(threading.main_thread().ident or 0, self._call_number)
        while self._others:
            self._others.pop(0)()


_watch = _Watch()
