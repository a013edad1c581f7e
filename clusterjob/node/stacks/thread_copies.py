"""Copy registers and stacks of a process's threads; pause each for some milliseconds.

ptrace(2) stops one thread after another. Debuggers, and py-spy with `--native`, read the symbols of
all libraries meanwhile, and those of torch take 0.1 s and more. Here `native_frames` finds the
meaning of the copies afterwards. If this process ends, the kernel lets a stopped thread continue.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from dataclasses import dataclass

from clusterjob.node.stacks import kernel

_MAX_STACK = 256 << 10  # bytes
_MAX_THREADS = 1000
_STOP_SECONDS = 0.5  # for one thread to stop; it runs meanwhile
_POLL_SECONDS = 0.0002
_SEIZE, _INTERRUPT, _DETACH, _GET_REGISTERS = 0x4206, 0x4207, 17, 0x4204  # ptrace(2)
_EVENT_STOP = 128
_GENERAL_REGISTERS = 1
_WALL = 0x40000000  # waitpid(2): for threads, too
_MACHINE = "x86_64"
# The registers in the order of ptrace(2), by their numbers in DWARF; -1 has none.
_REGISTERS = (15, 14, 13, 12, 6, 3, 11, 10, 9, 8, 0, 2, 1, 4, 5, -1, 16, -1, -1, 7)
STACK_POINTER, PROGRAM_COUNTER = 7, 16


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@dataclass(frozen=True)
class ThreadCopy:
    """One thread at one moment.

    Attributes:
        registers: its registers, by their numbers in DWARF.
        stack: the bytes above the stack pointer.
    """

    registers: dict[int, int]
    stack: bytes

    def word(self, address: int) -> int:
        """Return the word at an address of the stack.

        Raises:
            LookupError: it has not been copied.
        """
        at = address - self.registers[STACK_POINTER]
        if not 0 <= at <= len(self.stack) - 8:
            raise LookupError("outside of the copied stack")
        return int.from_bytes(self.stack[at : at + 8], "little")


def copy_threads(pid: int) -> dict[int, ThreadCopy]:
    """Return a copy of each thread that can be stopped, by thread id.

    Raises:
        OSError: the process cannot be read: it has ended, or ptrace is not permitted.
    """
    if os.uname().machine != _MACHINE:
        raise OSError(errno.ENOSYS, f"only for {_MACHINE}")
    found: dict[int, ThreadCopy] = {}
    errors: list[OSError] = []

    def read() -> None:
        try:
            memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
            try:
                for tid in sorted(map(int, os.listdir(f"/proc/{pid}/task")))[:_MAX_THREADS]:
                    taken = None if kernel.waits_for_files(tid) else _Tracing(tid).copy(memory)
                    if taken is not None:
                        found[tid] = taken
            finally:
                os.close(memory)
        except OSError as error:
            errors.append(error)

    # The end of the tracing thread lets a thread continue that did not stop in time.
    tracer = threading.Thread(target=read)
    tracer.start()
    tracer.join()
    if errors and not found:
        raise errors[0]
    return found


class _Tracing:
    """Stop a thread for a moment.

    Args:
        tid: the thread.
    """

    def __init__(self, tid: int) -> None:
        self._tid = tid
        self._libc = ctypes.CDLL(None, use_errno=True)

    def copy(self, memory: int) -> ThreadCopy | None:
        """Return the copy; None if the thread has ended or does not stop.

        Args:
            memory: the descriptor of the memory of its process.

        Raises:
            OSError: ptrace is not permitted.
        """
        try:
            self._trace(_SEIZE)
            self._trace(_INTERRUPT)
            signal = self._wait()
            if signal is None:
                return None
            try:
                return self._copy(memory)
            finally:
                self._trace(_DETACH, data=signal)
        except (ProcessLookupError, ChildProcessError):
            return None

    def _wait(self) -> int | None:
        """Wait until the thread stops; return a signal that it was about to get, or 0."""
        end = time.monotonic() + _STOP_SECONDS
        while time.monotonic() < end:
            tid, status = os.waitpid(self._tid, os.WNOHANG | _WALL)
            if not tid:
                time.sleep(_POLL_SECONDS)
            elif not os.WIFSTOPPED(status):
                return None
            else:
                return 0 if status >> 16 == _EVENT_STOP else os.WSTOPSIG(status)
        return None

    def _copy(self, memory: int) -> ThreadCopy:
        values = (ctypes.c_uint64 * 64)()
        vector = _Vector(ctypes.addressof(values), ctypes.sizeof(values))
        self._trace(_GET_REGISTERS, _GENERAL_REGISTERS, ctypes.addressof(vector))
        registers = {number: values[index] for index, number in enumerate(_REGISTERS)}
        return ThreadCopy(registers, os.pread(memory, _MAX_STACK, registers[STACK_POINTER]))

    def _trace(self, request: int, address: int = 0, data: int = 0) -> None:
        arguments = map(ctypes.c_long, (request, self._tid, address, data))
        if self._libc.ptrace(*arguments) == -1:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
