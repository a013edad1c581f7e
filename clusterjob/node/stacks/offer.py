"""Let other processes of the user read the Python stacks of this process.

faulthandler's signal handler writes the stack into an unnamed file. It is written in C, so it also
works while a thread sleeps, waits for a lock or holds the interpreter in native code.

- Each thread writes its own stack, when it gets `SIGNAL`. faulthandler can write the stacks of all
  threads at once, but it reads those of running threads, and that crashes the process.
- `SIGNAL` is SIGURG, which is ignored by default. So it ends no process, even if the process
  executes another program just before the signal arrives.
- A thread that runs Python code may be at a place where Python 3.11 and 3.12 crash in the handler:
  between two steps of a call. Python 3.9 and 3.10 change reference counts in the handler without
  the interpreter's lock, so no other thread may run. The name of the file tells the requester.
- So a main thread that runs gets `SIGNAL_FOR_PYTHON` first. Its handler is Python code, which the
  interpreter calls at a safe place, with its lock: it writes the stacks of all threads. It never
  runs while the main thread is in native code, but then the other signal is safe.
- Python 3.13.0 crashes in the handler (python/cpython#123967), so there the process offers nothing.
- An open file shows that the process wants the signal. It is closed when the program sets its own
  handler or executes another program.

`hook` loads a copy of this file into Python 3.7 and newer. It imports only modules that Python has
loaded already or contains, so that it takes less than a millisecond.
"""

import _signal  # type: ignore[import-not-found]  # `signal` takes a millisecond
import _thread
import atexit
import os
import sys

# typing is not imported: see above.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

SIGNAL = int(_signal.SIGURG)
SIGNAL_FOR_PYTHON = int(_signal.SIGWINCH)  # ignored by default, too
# In the links of the descriptors in /proc/PID/fd, by signal.
FILES = {
    SIGNAL: "clusterjob-stack",
    SIGNAL_FOR_PYTHON: "clusterjob-python-stacks",
}
# The end of a name: which thread can be asked.
ALONE = "-alone"  # only one that runs alone, or sleeps while no other runs
ASLEEP = "-asleep"  # only one that sleeps
_MAX_FRAMES = 100
END = "end\n"  # of the answer to `SIGNAL_FOR_PYTHON`


class _Offer:
    """Python-level signal handler that owns the file.

    Only for `SIGNAL_FOR_PYTHON` Python calls it; else faulthandler's C handler does the work.

    When the program sets another handler, Python frees this object, and its file is closed.
    """

    def __init__(self, name: str) -> None:
        self.descriptor = anonymous_file(name)
        self._inode = os.fstat(self.descriptor).st_ino

    def __call__(self, _number: int, frame: "FrameType | None") -> None:
        """Write the stacks of all threads if a request waits: it has written one byte."""
        try:
            found = os.fstat(self.descriptor)
            if (found.st_ino, found.st_size) == (self._inode, 1):
                os.write(self.descriptor, (_stacks(frame) + END).encode(errors="backslashreplace"))
        except Exception:  # noqa: S110  # it must not reach the program
            pass

    def __del__(self) -> None:
        try:
            if os.fstat(self.descriptor).st_ino == self._inode:
                os.close(self.descriptor)
        except (AttributeError, OSError):
            pass


def _stacks(frame: "FrameType | None") -> str:
    """Return the stacks of all threads in the form of faulthandler, but with thread ids.

    Args:
        frame: the frame of this thread, which is the main thread.
    """
    known = getattr(sys.modules.get("threading"), "_active", {})
    own, process = _thread.get_ident(), os.getpid()
    lines = []
    for ident, top in {**sys._current_frames(), own: frame}.items():
        tid = process if ident == own else getattr(known.get(ident), "native_id", None) or ident
        lines.append(f"Thread {tid}\n")
        each = top
        for _ in range(_MAX_FRAMES):
            if each is None:
                break
            code = each.f_code
            line = each.f_lineno or "???"
            lines.append(f'  File "{code.co_filename}", line {line} in {code.co_name}\n')
            each = each.f_back
    return "".join(lines)


def offer() -> None:
    """Offer the stacks; leave alone a signal that already has a handler."""
    version = sys.version_info[:3]
    if version == (3, 13, 0):
        return
    end = ALONE if (3, 9) <= version < (3, 11) else ASLEEP if version < (3, 13) else ""
    for number, name in FILES.items():
        if _signal.getsignal(number) is not _signal.SIG_DFL:
            continue
        try:
            import faulthandler

            own = _Offer(name + end)
            _signal.signal(number, own)
            if number == SIGNAL_FOR_PYTHON:
                _signal.siginterrupt(number, False)
                continue
            faulthandler.register(number, file=own.descriptor, all_threads=False, chain=False)
            # The exiting interpreter resets signal handlers, then ends faulthandler, which sets
            # Python's handler again: a signal after that would crash the process.
            atexit.register(faulthandler.unregister, number)
        except (AttributeError, ImportError, OSError, RuntimeError, ValueError):
            return  # outside of the main thread, or without faulthandler


def anonymous_file(name: str) -> int:
    """Return the descriptor of a new file for appending, which is in no directory.

    Args:
        name: part of the link of the descriptor in /proc/PID/fd.
    """
    append = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
    if hasattr(os, "memfd_create"):  # Python may be built without it
        created = os.memfd_create(name)
        try:
            return os.open(f"/proc/self/fd/{created}", append)
        finally:
            os.close(created)
    directory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp"  # noqa: S108
    path = f"{directory}/{name}.{os.getpid()}.{os.urandom(4).hex()}"
    descriptor = os.open(path, append | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    return descriptor
