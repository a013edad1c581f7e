"""Run a command on a real terminal (a pty) and record its output byte by byte."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from procs import TEST_TIMEOUT

TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    " os.execvp(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """A command whose stdout and stderr are a terminal; a context manager.

    Its stdin is /dev/null. With ``controlling``, its stdin is the terminal too, whose keys send
    signals. ``options``, which go to `subprocess.Popen`, may replace the streams.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        cwd: Path | None = None,
        columns: int = 120,
        rows: int = 40,
        controlling: bool = False,
        **options: Any,
    ) -> None:
        self.shown = b""
        self._master, slave = os.openpty()
        self._set_size(rows, columns)
        if controlling:
            argv = [sys.executable, "-S", "-c", TAKE_TERMINAL, *argv]
            options |= {"stdin": slave, "start_new_session": True}
        streams = {"stdin": subprocess.DEVNULL, "stdout": slave, "stderr": slave}
        self.process = subprocess.Popen(argv, cwd=cwd, **streams | options)
        os.close(slave)

    def resize(self, rows: int, columns: int) -> None:
        """Change the size of the terminal and notify the command, as a terminal emulator does."""
        self._set_size(rows, columns)
        self.process.send_signal(signal.SIGWINCH)

    def _set_size(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    @property
    def attributes(self) -> list[Any]:
        """The settings of the terminal, such as raw mode."""
        return termios.tcgetattr(self._master)

    def type(self, keys: bytes) -> None:
        """Send keys, such as Ctrl-C."""
        os.write(self._master, keys)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)

    def read_until(self, wanted: bytes, timeout: float = TEST_TIMEOUT) -> None:
        """Read the output until it contains these bytes; fail the test after the timeout."""
        end = time.monotonic() + timeout
        while wanted not in self.shown:
            assert self._read(end - time.monotonic()), (
                f"{wanted!r} was not shown, but {self.shown!r}"
            )

    def answer(self, question: bytes, text: str) -> None:
        """Type a line after a question; later questions are searched after it."""
        self.read_until(question)
        self.shown = self.shown.partition(question)[2]
        self.type(f"{text}\n".encode())

    def echoes(self) -> bool:
        """Return whether the terminal shows what is typed."""
        return bool(termios.tcgetattr(self._master)[3] & termios.ECHO)

    def finish(self, timeout: float = TEST_TIMEOUT) -> int:
        """Read the output to the end of the command; return its exit code."""
        end = time.monotonic() + timeout
        while self._read(end - time.monotonic()):
            pass
        return self.process.wait(max(0.1, end - time.monotonic()))

    def _read(self, timeout: float) -> bool:
        if not select.select([self._master], [], [], max(0.0, timeout))[0]:
            return False
        with contextlib.suppress(OSError):  # EIO: no process has the terminal open any more
            data = os.read(self._master, 65536)
            self.shown += data
            return bool(data)
        return False


def show(argv: Sequence[str], **options: Any) -> tuple[int, str]:
    """Run a command on a terminal; return its exit code and output, with ``\\n`` line breaks."""
    with Terminal(argv, **options) as terminal:
        code = terminal.finish()
        return code, terminal.shown.decode(errors="replace").replace("\r\n", "\n")
