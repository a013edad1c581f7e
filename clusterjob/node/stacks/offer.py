"""Let other processes of the user read the Python stacks of this process.

Two signal handlers write into unnamed files. Both signals are ignored by default, so they end no
process, even if it executes another program just before they arrive.

- `SIGNAL_FOR_PYTHON` has a handler in Python. The interpreter calls it in the main thread at a safe
  place, also if the thread sleeps in a call of Python's, and it writes the stacks of all threads.
  The signal interrupts system calls, as that of torch's DataLoader does; Python repeats them.
  The handler never runs while the main thread is in native code.
- Then `SIGNAL` is safe. faulthandler's handler is written in C: it writes the stack of the main
  thread, also if the thread holds the interpreter or waits in native code. At a place in Python
  code, Python 3.11 and 3.12 may crash in it. faulthandler can write the stacks of all threads, but
  it reads those of running threads, and that crashes the process.
- Python 3.13.0 crashes in faulthandler's handler (python/cpython#123967): it offers nothing.
- An open file shows that the process wants its signal. It is closed when the program sets its own
  handler or executes another program.

`workers.hook` loads a copy of this file into Python 3.7 and newer. It imports only modules that
Python has loaded already or contains, so that it takes less than a millisecond.
"""

import _signal  # type: ignore[import-not-found]  # `signal` takes a millisecond
import _thread
import atexit
import fcntl
import os
import sys

# typing is not imported: see above.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

SIGNAL = int(_signal.SIGURG)
SIGNAL_FOR_PYTHON = int(_signal.SIGWINCH)  # ignored by default, too
# In the links of the descriptors in /proc/PID/fd, by signal, in the order in which they are sent.
FILES = {
    SIGNAL_FOR_PYTHON: "clusterjob-python-stacks",
    SIGNAL: "clusterjob-stack",
}
_MAX_LINES = 20000  # of an answer
END = "\n\n"  # of the answer to `SIGNAL_FOR_PYTHON`: an empty line


class _Offer:
    """Python-level signal handler that owns the file.

    Only for `SIGNAL_FOR_PYTHON` Python calls it; else faulthandler's C handler does the work. When
    the program sets another handler, Python frees this object, and its file is closed.
    """

    def __init__(self, name: str) -> None:
        self.descriptor = anonymous_file(name)
        self._inode = os.fstat(self.descriptor).st_ino

    def __call__(self, _number: int, frame: "FrameType | None") -> None:
        """Write the stacks of all threads if a request waits: it has written one byte."""
        try:
            found = os.fstat(self.descriptor)
            if (found.st_ino, found.st_size) == (self._inode, 1):
                os.write(self.descriptor, f"{_stacks(frame)}\n".encode(errors="backslashreplace"))
        except Exception:  # noqa: S110  # it must not reach the program
            pass

    def __del__(self) -> None:
        try:
            if os.fstat(self.descriptor).st_ino == self._inode:
                os.close(self.descriptor)
        except (AttributeError, OSError):
            pass


def _stacks(frame: "FrameType | None") -> str:
    """Return the stacks of all threads in the form of faulthandler, the main thread's first.

    Args:
        frame: the frame of this thread, which is the main thread.
    """
    known = getattr(sys.modules.get("threading"), "_active", {})
    threads = [("MainThread", frame)]  # type: list[tuple[str, FrameType | None]]
    for ident, top in sys._current_frames().items():
        if ident != _thread.get_ident():
            threads.append((getattr(known.get(ident), "name", f"thread {ident}"), top))
    lines = []
    for name, innermost in threads:
        lines.append(f"Thread {name}\n")
        each = innermost
        while each is not None and len(lines) < _MAX_LINES:
            code, line = each.f_code, each.f_lineno or "???"
            lines.append(f'  File "{code.co_filename}", line {line} in {code.co_name}\n')
            each = each.f_back
    return "".join(lines)


def offer() -> None:
    """Offer the stacks; leave alone a signal that already has a handler."""
    if sys.version_info[:3] == (3, 13, 0):
        return
    try:
        import faulthandler

        for number, name in FILES.items():
            if _signal.getsignal(number) is not _signal.SIG_DFL:
                continue
            own = _Offer(name)
            _signal.signal(number, own)
            if number == SIGNAL:
                faulthandler.register(number, file=own.descriptor, all_threads=False, chain=False)
                # The exiting interpreter resets signal handlers, then ends faulthandler, which sets
                # Python's handler again: a signal after that would crash the process.
                atexit.register(faulthandler.unregister, number)
    except (AttributeError, ImportError, OSError, RuntimeError, ValueError):
        pass  # outside of the main thread, or without faulthandler


def anonymous_file(name: str) -> int:
    """Return the descriptor of a new file for appending, which is in no directory.

    Args:
        name: part of the link of the descriptor in /proc/PID/fd.
    """
    append = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
    if hasattr(os, "memfd_create"):  # Python may be built without it
        descriptor = os.memfd_create(name)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, append)
        return descriptor
    directory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp"  # noqa: S108
    path = f"{directory}/{name}.{os.getpid()}.{os.urandom(4).hex()}"
    descriptor = os.open(path, append | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    return descriptor
