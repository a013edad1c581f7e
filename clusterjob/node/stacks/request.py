"""Ask a running process of the same user for the Python stacks of its threads.

The process must have called `offer`. If its main thread runs, Python code of it writes all stacks.
Else each of its threads is asked in turn, the main thread first, and writes its own stack. Threads
of native libraries write nothing.

A thread that waits for a FUSE file system is not asked: a signal would interrupt its read, and some
libraries take that for an error. If it is the only Python thread, a native thread writes its stack.

The kernel shows when an answer is complete: the file is not empty, and the thread does not block
the signal any more, as it does while it writes. A thread that sleeps with an empty file, and for
which the signal is not pending, has no Python stack.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import time
from collections import deque
from dataclasses import dataclass

from clusterjob.node.stacks import frames, kernel, offer
from clusterjob.node.stacks.frames import MAX_THREADS, ThreadStack

# Seconds for a process to answer; with a free core a thread needs less than a millisecond.
ANSWER_SECONDS = 1.5
POLL_SECONDS = 0.01  # between two calls of `StackRequest.step` without progress
_SLICE = 0.05  # seconds after which the other threads are asked before a thread that is silent
_PYTHON_SECONDS = 0.2  # for the main thread to run Python code
_SAFE_SECONDS = 0.4  # from the beginning, for a moment in which a thread can be asked
_MAX_BYTES = 1 << 18
_MAX_ASKED = 1000  # threads
_HEADER = "Stack (most recent call first):"
_HELP_SECONDS = 0.3
# The number of the system call tgkill(2), by CPU architecture; C libraries may lack the function.
_TGKILL = {"x86_64": 234, "aarch64": 131, "ppc64le": 250, "s390x": 241, "riscv64": 131}


@dataclass(frozen=True)
class _Signals:
    """Whether a signal is pending for a thread, and blocked; whether it sleeps, or is stuck."""

    pending: bool
    blocked: bool
    sleeps: bool
    stuck: bool


class StackRequest:
    """A request for the stacks of one process; call `step` until `done`, then `answer`.

    Args:
        pid: the process.

    Attributes:
        offered: whether the process offers its stacks.
        done: whether all threads have answered that can answer.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._file: int | None = None
        self._directory: int | None = None
        # The open directory stays that of this process, even if its pid is used again.
        with contextlib.suppress(OSError):
            self._directory = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._file = _open_offer(self._directory)
        self._name = "" if self._file is None else os.readlink(f"/proc/self/fd/{self._file}")
        self.offered = self._file is not None
        self.done = not self.offered
        self._locked = False
        self._waiting: deque[int] = deque()  # threads to ask
        self._asked: int | None = None  # the thread that has been asked
        self._asked_at = self._begun_at = 0.0
        self._late: set[int] = set()  # threads that have been asked and have not begun to answer
        self._again: set[int] = set()  # threads that could not be asked at first
        self._silent: list[int] = []  # native threads
        self._python: int | None = None  # the file for the stacks that Python code writes
        self._helper: tuple[int, int] | None = None  # the native thread and the file for all stacks
        self._helped = False
        self._found: dict[int, str] = {}

    def step(self) -> bool:
        """Collect an answer that is complete and ask the next thread; return whether it did."""
        if self.done or not (self._locked or self._lock()):
            return False
        try:
            if self._python is not None:
                return self._collect_python(self._python)
            if self._helper is not None:
                return self._collect_help(*self._helper)
            if self._asked is not None and not self._collect(self._asked):
                return False
            return self._ask()
        except OSError:  # the process has ended
            self._finish()
            return True

    def answer(self) -> dict[int, ThreadStack]:
        """Return the stacks by thread id, the main thread's first, and close the request.

        If the main thread has not answered, its stack has no frames.
        """
        main = self._comm(self.pid)
        threads = {self.pid: ThreadStack("MainThread", ())} if self._found else {}
        for tid in sorted(self._found, key=lambda tid: (tid != self.pid, tid))[:MAX_THREADS]:
            comm = self._comm(tid)
            name = comm if comm != main and comm else f"thread {tid}"
            threads[tid] = frames.parse_thread(
                "MainThread" if tid == self.pid else name, self._found[tid]
            )
        self.close()
        return threads

    def close(self) -> None:
        """Close the request."""
        self._finish()
        if self._directory is not None:
            os.close(self._directory)
            self._directory = None

    def _finish(self) -> None:
        """End the request, so that the next one can lock the file."""
        for descriptor in (self._file, self._python, self._helper[1] if self._helper else None):
            if descriptor is not None:
                os.close(descriptor)
        self._file = self._python = self._helper = None
        self.done = True

    def _lock(self) -> bool:
        """Lock the file against other requests, and list the threads."""
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                return False
            raise
        self._locked = True
        self._begun_at = time.monotonic()
        assert self._directory is not None
        main = self._signals(self.pid)
        if main is not None and not main.sleeps:
            self._ask_python()
        threads = sorted(_threads(self._directory))[:_MAX_ASKED]
        for tid in sorted(threads, key=lambda tid: tid != self.pid):
            signals = self._signals(tid)
            if signals is not None and signals.pending:  # of an earlier request
                self._late.add(tid)
            elif signals is not None:
                self._waiting.append(tid)
        return True

    def _ask(self) -> bool:
        """Ask the next thread; return False if only late threads are left."""
        for tid in list(self._late):
            signals = self._signals(tid)
            if signals is None:
                self._late.discard(tid)
            elif not (signals.pending or signals.blocked):
                self._late.discard(tid)  # its answer may be mixed with another one: ask again
                self._waiting.append(tid)
        if not self._waiting:
            if self._get_help():
                return True
            if not self._late:
                self._finish()
            return self.done
        return self._ask_thread(self._waiting.popleft())

    def _ask_thread(self, tid: int) -> bool:
        """Ask a thread if it can be asked now; return whether it is done with or asked."""
        assert self._file is not None
        os.ftruncate(self._file, 0)
        signals = self._signals(tid)
        if signals is not None and self._endangered(tid, signals):
            if time.monotonic() < self._begun_at + _SAFE_SECONDS:
                self._waiting.append(tid)
                return False
            # The main thread is in native code; if others run, they may be native threads.
            if tid != self.pid:
                self._helped = True  # no thread may read this one, which runs
                return True
        if signals is None or not (signals.blocked or self._waits_for_fuse(tid)):
            self._asked, self._asked_at = tid, time.monotonic()
            if not _signal_thread(self.pid, tid, offer.SIGNAL):
                self._asked = None
        elif tid not in self._again:  # it may be for a moment: try again
            self._again.add(tid)
            self._waiting.append(tid)
        return True

    def _collect(self, tid: int) -> bool:
        """Return whether the thread has answered, has ended, or is late."""
        assert self._file is not None
        begun = os.fstat(self._file).st_size > 0  # before the signals: see above
        signals = self._signals(tid)
        in_time = time.monotonic() < self._asked_at + _SLICE
        if signals is None:
            pass
        elif signals.pending or (tid == self.pid and not begun and not signals.sleeps):
            if in_time or not self._waiting:
                return False
            self._late.add(tid)
        elif signals.blocked or not (begun or signals.sleeps or not in_time):
            return False
        elif begun:
            text = os.pread(self._file, _MAX_BYTES, 0).decode(errors="replace")
            others = (self._signals(late) for late in self._late)
            if _is_one_stack(text) and all(each is None or each.pending for each in others):
                self._found[tid] = text
            else:  # another thread has written too
                self._waiting.append(tid)
        elif os.fstat(self._file).st_size:  # written in the meantime
            return False
        else:
            self._silent.append(tid)
        self._asked = None
        return True

    def _ask_python(self) -> None:
        """Let Python code of the main thread write all stacks."""
        assert self._directory is not None
        self._python = _open_offer(self._directory, offer.SIGNAL_FOR_PYTHON)
        if self._python is not None:
            os.ftruncate(self._python, 0)
            os.pwrite(self._python, b"?", 0)
            _signal_thread(self.pid, self.pid, offer.SIGNAL_FOR_PYTHON)

    def _collect_python(self, file: int) -> bool:
        """Return whether the Python code has answered, or is late: it then writes nothing."""
        text, end, _ = os.pread(file, _MAX_BYTES, 0).decode(errors="replace").partition(offer.END)
        if end:
            self._found = frames.of_all_threads(text[1:])
            self._finish()
        elif time.monotonic() >= self._begun_at + _PYTHON_SECONDS:
            os.ftruncate(file, 0)
            os.close(file)
            self._python = None
        else:
            return False
        return True

    def _endangered(self, tid: int, signals: _Signals) -> bool:
        """Return whether the process might crash if this thread were asked now; see `offer`."""
        if offer.ASLEEP in self._name:
            return not signals.sleeps
        if offer.ALONE not in self._name:
            return False
        assert self._directory is not None
        for other in _threads(self._directory):
            fields = self._read(f"task/{other}/stat").rpartition(")")[2].split()
            if other != tid and fields[:1] == ["R"]:
                return True
        return False

    def _waits_for_fuse(self, tid: int) -> bool:
        return self._read(f"task/{tid}/wchan").strip() in kernel.FUSE_WAITS

    def _get_help(self) -> bool:
        """Let a native thread write the stack of a main thread that is stuck in the kernel.

        Only if it is the only Python thread: the stack of one that runs must not be read.
        """
        main = self._signals(self.pid)
        stuck = main is not None and (main.stuck or self._waits_for_fuse(self.pid))
        if not stuck or self._helped or self._found or not self._silent:
            return False
        assert self._directory is not None
        self._helped = True
        file = _open_offer(self._directory, offer.SIGNAL_FOR_ALL)
        if file is None:
            return False
        os.ftruncate(file, 0)
        self._helper, self._asked_at = (self._silent[0], file), time.monotonic()
        _signal_thread(self.pid, self._silent[0], offer.SIGNAL_FOR_ALL)
        return True

    def _collect_help(self, tid: int, file: int) -> bool:
        """Return whether the native thread has written the stack, or is too slow."""
        begun = os.fstat(file).st_size > 0
        signals = self._signals(tid, offer.SIGNAL_FOR_ALL)
        if signals is not None and (signals.pending or signals.blocked or not begun):
            if time.monotonic() < self._asked_at + _HELP_SECONDS:
                return False
        elif signals is not None:
            text = os.pread(file, _MAX_BYTES, 0).decode(errors="replace")
            if text.count("(most recent call first):") == 1:
                self._found[self.pid] = text
        self._finish()
        return True

    def _signals(self, tid: int, number: int = offer.SIGNAL) -> _Signals | None:
        """Return the state of a signal in a thread; None if the thread has ended."""
        bit = 1 << (number - 1)
        lines = (line.partition(":") for line in self._read(f"task/{tid}/status").splitlines())
        values = {name: value.split()[0] for name, _, value in lines if value.strip()}
        if "SigBlk" not in values or values["State"] in "ZX":
            return None
        return _Signals(
            bool(int(values["SigPnd"], 16) & bit),
            blocked=bool(int(values["SigBlk"], 16) & bit),
            sleeps=values["State"] in "SD",
            stuck=values["State"] == "D",
        )

    def _comm(self, tid: int) -> str:
        return self._read(f"task/{tid}/comm").strip()

    def _read(self, path: str) -> str:
        return "" if self._directory is None else _read_at(self._directory, path)


def _is_one_stack(text: str) -> bool:
    return text.startswith(_HEADER) and text.count(_HEADER) == 1


def _open_offer(directory: int, number: int = offer.SIGNAL) -> int | None:
    """Open the file of a process that offers its stacks, and catches the signal.

    Args:
        directory: the descriptor of its directory in /proc.
        number: the signal.
    """
    caught = _read_at(directory, "status").partition("SigCgt:")[2].split()
    if not caught or not int(caught[0], 16) >> (number - 1) & 1:
        return None
    file = offer.FILES[number]
    opened = os.open("fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:
        for name in os.listdir(opened):
            with contextlib.suppress(FileNotFoundError):
                link = os.readlink(name, dir_fd=opened).rpartition("/")[2]
                # The file is in no directory: another file of this name must not be truncated.
                if (
                    link.startswith((file, f"memfd:{file}"))
                    and os.stat(name, dir_fd=opened).st_nlink == 0
                ):
                    return os.open(name, os.O_RDWR | os.O_CLOEXEC, dir_fd=opened)
    finally:
        os.close(opened)
    return None


def _threads(directory: int) -> list[int]:
    """Return the threads of a process; none if it has ended.

    Args:
        directory: the descriptor of its directory in /proc.
    """
    try:
        listed = os.open("task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
        try:
            return [int(name) for name in os.listdir(listed)]
        finally:
            os.close(listed)
    except OSError:
        return []


def _read_at(directory: int, path: str) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return ""
    try:
        return os.read(descriptor, 1 << 14).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _signal_thread(pid: int, tid: int, signal: int) -> bool:
    """Send a signal to one thread; return False if it has ended, or on an unknown CPU."""
    number = _TGKILL.get(os.uname().machine)
    if number is None:
        return False
    return bool(_libc().syscall(ctypes.c_long(number), pid, tid, signal) == 0)
