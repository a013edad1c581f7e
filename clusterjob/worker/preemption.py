"""The worker side of a preemption: how a training script learns that its job's end is near, and
leaves to be queued again.

The warning comes through a pipe of the agent that started this process. Where another launcher did,
a file in the job's directory stands for it, looked at once a second; and so do the scheduler's own
signals. `Context` offers what is here.
"""

from __future__ import annotations

import os

from clusterjob.worker import process

# Not typing's: importing that costs as much as the rest of this module. Type checkers take the name
# for theirs.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType
    from typing import Any, NoReturn

    import torch

_INTERVAL = 1.0  # seconds between two looks at what cannot be waited for
_LEAVING = 5.0  # seconds for a process group whose other members may have gone already
_FIRST_SIGNAL = 10  # above SIGRTMIN: the first few belong to libraries
# CLUSTERJOB_WARNING_FD where there is no agent, and a scheduler signals each process of a job that
# it warns.
BY_SIGNALS = "none"


class Preemptible:
    """The part of a `Context` by which a script lives with preemption."""

    local_rank: int
    device: torch.device
    _leave: Callable[[bool], None]
    _pid: int

    @property
    def attempt(self) -> int:
        """Which start of the job this is, from 0. Restarts of the workers alone do not count."""
        from clusterjob.node import contract

        return contract.read_attempt(os.environ)

    @property
    def preempted(self) -> bool:
        """Whether the job's end is near. Costs a few microseconds, so every step may ask.

        Processes may see it at different steps. To leave together they have to agree:
        ``ctx.reduce(ctx.preempted, "max")``.
        """
        _watch.arm(self._pid)
        return _watch.look()

    def on_preempt(self, callback: Callable[[], object]) -> None:
        """Have a function called, once, when the job's end is near; several are called in the order
        in which they were given.

        It runs on the main thread as soon as that runs Python, in the middle of whatever it does: a
        step may be half done. What it raises goes on from there, and may end the script. Given on
        another thread, it runs on a thread of its own. Given after the warning, it runs at once.

        Args:
            callback: takes nothing.
        """
        _watch.arm(self._pid)
        _watch.add(callback)

    def requeue(self) -> NoReturn:
        """Leave in order that the job be queued again: leave the process group, then end with the
        exit code 75.

        Every process calls it, once the checkpoint is safe. Those that fail because a peer has left
        like this do not fail the job. Without a warning, 75 is a failure like any other.

        Raises:
            SystemExit: always.
        """
        from clusterjob.node.verdict import PREEMPTED_EXIT_CODE

        _announce(self.local_rank, PREEMPTED_EXIT_CODE)
        if not self._leave_soon():
            _end_without_the_group(PREEMPTED_EXIT_CODE)
        raise SystemExit(PREEMPTED_EXIT_CODE)

    def _leave_soon(self) -> bool:
        """Leave the process group; return False where collectives under way keep this process in
        it.
        """
        import threading

        def leave() -> None:
            if self.device.type == "cuda":
                import torch

                torch.cuda.set_device(self.device)  # a thread starts at cuda:0
            self._leave(False)

        thread = threading.Thread(target=leave, daemon=True, name="clusterjob-leave")
        thread.start()
        thread.join(_LEAVING)
        return not thread.is_alive()


def _announce(local_rank: int, exit_code: int) -> None:
    """Tell the agent before the peers can feel it."""
    from clusterjob.node.workers.report import report

    descriptor = process.report_pipe()
    if descriptor is not None:
        report(descriptor, local_rank, message="left to be queued again", exit_code=exit_code)


def _end_without_the_group(exit_code: int) -> None:
    """Have the process end, once the script has, without waiting for the collectives of a group
    that it cannot leave.
    """
    import atexit

    def end() -> None:
        atexit.unregister(end)
        process.end_process(exit_code)

    atexit.register(end)


def _ask(pipe: int, seconds: float) -> tuple[bool, bool]:
    """Return (warned, being stopped), after waiting for either."""
    import select

    poll = select.poll()  # one for each question: threads and signal handlers cannot share it
    poll.register(pipe, select.POLLIN)
    events = sum(event for _, event in poll.poll(seconds * 1000))
    return bool(events & select.POLLIN), bool(events & ~select.POLLIN)


class _Watch:
    """What this process knows of the warning, and whom it tells."""

    def __init__(self) -> None:
        self._ready = False  # whether it is known where a warning would come from
        self._armed = False
        self._seen = False
        self._terminated_once = False
        self._pipe: int | None = None  # our agent's pipe, which nobody reads
        self._takes_sigterm = False
        self._job_dir: Path | None = None
        self._marker: Path | None = None
        self._next_look = 0.0
        self._callbacks: list[Callable[[], object]] = []  # for the main thread
        self._others: list[Callable[[], object]] = []
        self._calling = False
        self._call_number = 0  # the signal by which the thread calls the main one
        self._thread: Any = None

    # -- where a warning comes from --------------------------------------------------------------------------------------

    def arm(self, pid: int) -> None:
        """Be ready for a warning, and keep the scheduler's signals from ending this process at
        once.

        Args:
            pid: the process whose place in the job it is. Its children keep their signals: SIGTERM
                is how they are ended.
        """
        if self._armed:
            return
        import signal
        import threading

        self._find_sources()
        if os.getpid() != pid or threading.current_thread() is not threading.main_thread():
            return
        self._armed = True
        os.register_at_fork(after_in_child=self._disarm_child)
        if self._takes_sigterm and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminated)
        if (
            signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
        ):  # our agent and our scripts have it ignored
            signal.signal(signal.SIGUSR1, self._warned)

    def _find_sources(self) -> None:
        if self._ready:
            return
        self._ready = True
        from pathlib import Path

        from clusterjob.node import contract
        from clusterjob.node.logs import ends

        named = os.environ.get(contract.WARNING_FD, "")
        descriptor, _, inode = named.partition(":")
        try:
            # A child inherits the variable, and under this number perhaps a file of its own.
            if os.fstat(int(descriptor)).st_ino == int(inode):
                self._pipe = int(descriptor)
        except (ValueError, OSError):
            pass
        self._takes_sigterm = self._pipe is not None or named == BY_SIGNALS
        job_dir = os.environ.get(contract.JOB_DIR)
        if job_dir and self._pipe is None:
            self._job_dir = Path(job_dir)
            self._marker = ends.warning_file(self._job_dir, contract.read_attempt(os.environ))

    def look(self) -> bool:
        """Return whether the warning has come. On the main thread the callbacks have been called
        then.
        """
        if not self._seen:
            if self._pipe is not None:
                self._seen = _ask(self._pipe, 0)[0]
            elif self._marker is not None:
                self._seen = self._ask_marker(self._marker)
        if self._seen and self._callbacks:
            import threading

            if threading.current_thread() is threading.main_thread():
                self._call()
        return self._seen

    def _ask_marker(self, marker: Path) -> bool:
        import time

        moment = time.monotonic()
        if moment < self._next_look:
            return False
        self._next_look = moment + _INTERVAL
        return marker.exists()

    # -- signals ---------------------------------------------------------------------------------------------------------

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        """Take the first SIGTERM for the scheduler's warning, unless the workers are being stopped;
        the second one is meant.
        """
        if self._terminated_once or self._is_stopped():
            import signal

            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._terminated_once = True
        self._warned(number, frame)

    def _is_stopped(self) -> bool:
        if self._pipe is not None:
            return _ask(self._pipe, 0)[1]
        from clusterjob.node.logs import ends

        return self._job_dir is not None and ends.cancelled(self._job_dir)

    def _warned(self, _number: int, _frame: FrameType | None) -> None:
        self._seen = True
        self._call()

    def _disarm_child(self) -> None:
        import signal

        for number, ours, theirs in (
            (signal.SIGTERM, self._terminated, signal.SIG_DFL),
            (signal.SIGUSR1, self._warned, signal.SIG_IGN),
        ):
            if signal.getsignal(number) == ours:
                signal.signal(number, theirs)
        self._callbacks.clear()
        self._others.clear()

    # -- callbacks -------------------------------------------------------------------------------------------------------

    def add(self, callback: Callable[[], object]) -> None:
        """Have a function called when the warning comes; now, if it has come."""
        import threading

        if threading.current_thread() is threading.main_thread():
            self._callbacks.append(callback)
            self._call_number = self._call_number or self._free_signal()
        elif self.look():
            callback()
            return
        else:
            self._others.append(callback)
        if not self.look() and self._thread is None:
            self._thread = threading.Thread(
                target=self._wait, daemon=True, name="clusterjob-warning"
            )
            self._thread.start()

    def _free_signal(self) -> int:
        import signal

        for number in range(signal.SIGRTMIN + _FIRST_SIGNAL, signal.SIGRTMAX + 1):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._warned)
                return number
        raise RuntimeError("every real-time signal is taken")

    def _call(self) -> None:
        if self._calling:
            return  # whoever calls goes on with the rest
        self._calling = True
        try:
            while self._callbacks:
                self._callbacks.pop(0)()
        finally:
            self._calling = False

    def _wait(self) -> None:
        """Wait for the warning on a thread of its own. A real signal, unlike a wish, also ends a
        wait of the main thread.
        """
        import signal
        import threading
        import time

        while not self.look():
            if self._pipe is None:
                time.sleep(_INTERVAL)
            elif _ask(self._pipe, _INTERVAL) == (False, True):
                return
        if self._callbacks and self._call_number:
            signal.pthread_kill(threading.main_thread().ident or 0, self._call_number)
        while self._others:
            self._others.pop(0)()


_watch = _Watch()
