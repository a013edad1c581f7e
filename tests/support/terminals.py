"""A command on a real terminal (a pty): what it would show there, byte by byte."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from procs import PATIENCE


class Terminal:
    """A command whose stdout and stderr, and on request stdin, are a terminal of its own; a context
    manager.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        cwd: Path | None = None,
        columns: int = 120,
        rows: int = 40,
        **options: Any,
    ) -> None:
        self.shown = b""
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        options.setdefault("stdin", subprocess.DEVNULL)
        self.process = subprocess.Popen(argv, stdout=slave, stderr=slave, cwd=cwd, **options)
        os.close(slave)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)

    def read_until(self, wanted: bytes, patience: float = PATIENCE) -> None:
        """Read what is shown until these bytes have been; fail the test when they do not come."""
        end = time.monotonic() + patience
        while wanted not in self.shown:
            assert self._read(end - time.monotonic()), (
                f"{wanted!r} was not shown, but {self.shown!r}"
            )

    def finish(self, patience: float = PATIENCE) -> int:
        """Read to the end of the command; return its exit code."""
        end = time.monotonic() + patience
        while self._read(end - time.monotonic()):
            pass
        return self.process.wait(max(0.1, end - time.monotonic()))

    def _read(self, patience: float) -> bool:
        if not select.select([self._master], [], [], max(0.0, patience))[0]:
            return False
        with contextlib.suppress(OSError):  # EIO: the last process that had it open is gone
            data = os.read(self._master, 65536)
            self.shown += data
            return bool(data)
        return False


def show(argv: Sequence[str], **options: Any) -> tuple[int, str]:
    """Run a command on a terminal; return its exit code and what it has shown, line breaks as
    ``\\n``.
    """
    with Terminal(argv, **options) as terminal:
        code = terminal.finish()
        return code, terminal.shown.decode(errors="replace").replace("\r\n", "\n")
