"""Where a process is stuck: a worker offers to show its Python stack, and the process that started
it may ask, at any time.

The stack is written by faulthandler's signal handler, in C, so it comes from a thread that sleeps,
waits for a lock or holds the interpreter in native code. It goes into a file without a name (memfd)
that is also the sign that asking is safe: a process that has not offered, that has set its own
handler for the signal, or that has become another program, has no such file open. It is never
signalled; by default the signal would end it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import re
import signal
from pathlib import Path

from clusterjob.node.system import processes

SIGNAL = int(signal.SIGRTMAX) - 3  # far from the first ones, which libraries take
# How long a process has to write its stack; with a core of its own it needs some milliseconds.
ANSWER_SECONDS = 1.5
_FILE = "clusterjob-stack"
_MOST_BYTES = 1 << 18
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)')
_LIBRARY = os.path.dirname(os.__file__)
_STATES = {
    "R": "runs native code", "S": "sleeps", "D": "waits for a disk or a file system",
    "T": "is stopped", "t": "is being traced",
}  # fmt: skip


class _Offer:
    """The handler as Python knows it; faulthandler's own is below it. Gone once the script sets
    another, and its file with it.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create(_FILE, os.MFD_CLOEXEC)
        self._inode = os.fstat(self.descriptor).st_ino
        fcntl.fcntl(
            self.descriptor, fcntl.F_SETFL, os.O_APPEND
        )  # whoever asks cuts it to nothing first

    def __call__(self, number: int, frame: object) -> None:
        """Do nothing: the signal alone must not end the process."""

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            if os.fstat(self.descriptor).st_ino == self._inode:
                os.close(self.descriptor)


def offer() -> None:
    """Offer this process's stack to the one that started it. A handler that is there already is
    left alone.
    """
    if signal.getsignal(SIGNAL) is not signal.SIG_DFL:
        return
    try:
        own = _Offer()
        signal.signal(SIGNAL, own)
        faulthandler.register(SIGNAL, file=own.descriptor, all_threads=True, chain=False)
    except (AttributeError, OSError, RuntimeError, ValueError):
        return  # no memfd here, or not the main thread: then there is nothing to be asked


class Question:
    """One process that was asked where it is.

    Args:
        pid: a child of this process, which nobody reaps meanwhile.

    Attributes:
        asked: whether it offers an answer.
    """

    def __init__(self, pid: int) -> None:
        self._file = _open_offer(pid)
        if self._file is not None:
            os.ftruncate(self._file, 0)
            processes.send_signal(pid, SIGNAL)
        self.asked = self._file is not None

    def written(self) -> int | None:
        """Return how many bytes it has written since; None if it offers no answer."""
        return None if self._file is None else os.fstat(self._file).st_size

    def answer(self) -> tuple[str, ...]:
        """Return the lines that it has written since, and ask no more."""
        if self._file is None:
            return ()
        text = os.pread(self._file, _MOST_BYTES, 0).decode(errors="replace")
        os.close(self._file)
        self._file = None
        return tuple(text.splitlines())


def _open_offer(pid: int) -> int | None:
    """Return a process's open file, opened once more; None where it has none or does not catch the
    signal.
    """
    try:
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
    except (OSError, StopIteration, ValueError):
        pass
    return None


def main_thread(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Return the frames of the thread that took the signal, the main one unless that blocks it;
    innermost first, ours left out.
    """
    begin = next(
        (number for number, line in enumerate(lines) if line.startswith("Current thread")),
        len(lines),
    )
    frames = []
    for line in lines[begin + 1 :]:
        frame = _FRAME.fullmatch(line)
        if frame is None or (
            frame["name"] == "run_as_main" and frame["file"].endswith("program.py")
        ):
            break
        frames.append(line)
    return tuple(frames)


def in_words(frames: tuple[str, ...]) -> str:
    """Return where a thread is, as one clause: its innermost line, and the innermost of the
    program's own.

    Args:
        frames: what `main_thread` returns.
    """
    seen = [frame for frame in map(_FRAME.fullmatch, frames) if frame is not None]
    shown = [frame for frame in seen if not frame["file"].startswith("<frozen ")]
    if not shown:
        return "it does not say where it is"
    own = next(
        (
            frame
            for frame in shown
            if not frame["file"].startswith(_LIBRARY) and "-packages/" not in frame["file"]
        ),
        None,
    )
    text = "it imports, in " if len(shown) < len(seen) else "it is in "
    text += _place(shown[0])
    return f"{text}, from {_place(own)}" if own is not None and own is not shown[0] else text


def _place(frame: re.Match[str]) -> str:
    return f"{os.path.basename(frame['file'])} line {frame['line']}, {frame['name']}"


def has_come_to(frames: tuple[str, ...], file: str, name: str) -> bool:
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


def kernel_words(pid: int) -> str:
    """Return what the kernel knows of a process that does not say where it is, such as ``it sleeps
    (hrtimer_nanosleep)``.
    """
    fields = processes.stat_fields(pid)
    if fields is None or fields[0] not in _STATES:
        return "it is about to end"
    try:
        channel = Path(f"/proc/{pid}/wchan").read_text().strip().strip("0")
    except OSError:
        channel = ""
    return f"it {_STATES[fields[0]]}{f' ({channel})' if channel else ''}"
