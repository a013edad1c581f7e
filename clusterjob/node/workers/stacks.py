"""Read the Python stack of a running worker from its parent process, at any time.

The worker registers faulthandler's signal handler (`offer`). The parent sends the signal
(`StackRequest`). The handler is written in C, so it also works while a thread sleeps, waits for a
lock or holds the interpreter in native code. It writes the stack into an unnamed file (memfd).

The open memfd also shows that the signal is safe. A process has no such file open if it has not
called `offer`, has set its own handler for the signal, or has executed another program. Such a
process is never signalled, because the signal would end it by default.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import itertools
import os
import re
import signal
from pathlib import Path

from clusterjob.node.system import processes

SIGNAL = int(signal.SIGRTMAX) - 3  # libraries use the first real-time signals
# Timeout for a process to write its stack; with a free core the process needs some milliseconds.
ANSWER_SECONDS = 1.5
_FILE = "clusterjob-stack"
_MAX_BYTES = 1 << 18
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)')
_LIBRARY = os.path.dirname(os.__file__)
_STATES = {
    "R": "runs native code", "S": "sleeps", "D": "waits for a disk or a file system",
    "T": "is stopped", "t": "is being traced",
}  # fmt: skip


class _Offer:
    """Python-level signal handler that owns the memfd; faulthandler's C handler does the work.

    When the script sets another handler, Python frees this object, and its file is closed.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create(_FILE, os.MFD_CLOEXEC)
        self._inode = os.fstat(self.descriptor).st_ino
        # The parent truncates the file before each request; writing must then begin at its start.
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, os.O_APPEND)

    def __call__(self, number: int, frame: object) -> None:
        """Do nothing: the signal must not end the process."""

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            if os.fstat(self.descriptor).st_ino == self._inode:
                os.close(self.descriptor)


def offer() -> None:
    """Let the parent process read this process's stack.

    Do nothing if the signal already has a handler.
    """
    if signal.getsignal(SIGNAL) is not signal.SIG_DFL:
        return
    # This fails without memfd_create, or outside the main thread.
    with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
        own = _Offer()
        signal.signal(SIGNAL, own)
        faulthandler.register(SIGNAL, file=own.descriptor, all_threads=True, chain=False)


class StackRequest:
    """A request for the stack of one process.

    Args:
        pid: a child of this process; it must not be reaped during the request.

    Attributes:
        offered: whether the process offers its stack and was signalled.
    """

    def __init__(self, pid: int) -> None:
        self._file = _open_offer(pid)
        if self._file is not None:
            os.ftruncate(self._file, 0)
            processes.send_signal(pid, SIGNAL)
        self.offered = self._file is not None

    def written(self) -> int | None:
        """Return the number of bytes written so far; None if the process offers no stack."""
        return None if self._file is None else os.fstat(self._file).st_size

    def answer(self) -> tuple[str, ...]:
        """Return the lines that the process has written, and close the request."""
        if self._file is None:
            return ()
        text = os.pread(self._file, _MAX_BYTES, 0).decode(errors="replace")
        os.close(self._file)
        self._file = None
        return tuple(text.splitlines())


def _open_offer(pid: int) -> int | None:
    """Open the memfd of another process through /proc and return the descriptor.

    Return None if the process has no such file or does not catch the signal.
    """
    with contextlib.suppress(OSError, StopIteration, ValueError):
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        caught = next(
            int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:")
        )
        if not caught >> (SIGNAL - 1) & 1:
            return None
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(f"/proc/{pid}/fd/{name}").startswith(f"/memfd:{_FILE}"):
                    return os.open(f"/proc/{pid}/fd/{name}", os.O_RDWR | os.O_CLOEXEC)
    return None


def main_thread(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Return the frames of the thread that received the signal, innermost first.

    This is the main thread unless it blocks the signal. clusterjob's own frames are left out.
    """
    current = itertools.dropwhile(lambda line: not line.startswith("Current thread"), lines)
    return tuple(itertools.takewhile(_is_of_program, itertools.islice(current, 1, None)))


def _is_of_program(line: str) -> bool:
    frame = _FRAME.fullmatch(line)
    return frame is not None and not (
        frame["name"] == "run_as_main" and frame["file"].endswith("program.py")
    )


def position_text(frames: tuple[str, ...]) -> str:
    """Return a thread's position as one clause.

    It names the innermost line, and the innermost line of the program's own files.

    Args:
        frames: the result of `main_thread`.
    """
    seen = [frame for frame in map(_FRAME.fullmatch, frames) if frame is not None]
    shown = [frame for frame in seen if not frame["file"].startswith("<frozen ")]
    if not shown:
        return "its stack names no file"
    text = "it imports, in " if len(shown) < len(seen) else "it is in "
    text += _place(shown[0])
    for frame in shown:
        if not frame["file"].startswith(_LIBRARY) and "-packages/" not in frame["file"]:
            return text if frame is shown[0] else f"{text}, from {_place(frame)}"
    return text


def _place(frame: re.Match[str]) -> str:
    return f"{os.path.basename(frame['file'])} line {frame['line']}, {frame['name']}"


def is_inside(frames: tuple[str, ...], file: str, name: str) -> bool:
    """Return whether a thread is inside a function.

    Args:
        frames: frames as faulthandler writes them.
        file: the end of the function's file.
        name: the function's name.
    """
    return any(
        frame["file"].endswith(file) and frame["name"] == name
        for frame in map(_FRAME.fullmatch, frames)
        if frame is not None
    )


def kernel_text(pid: int) -> str:
    """Return the kernel's state of a process without a stack: ``it sleeps (hrtimer_nanosleep)``."""
    fields = processes.stat_fields(pid)
    if fields is None or fields[0] not in _STATES:
        return "it is about to end"
    try:
        channel = Path(f"/proc/{pid}/wchan").read_text().strip().strip("0")
    except OSError:
        channel = ""
    return f"it {_STATES[fields[0]]}{f' ({channel})' if channel else ''}"
