"""The connection to a program that a backend has started inside a job: two descriptors."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Protocol

_CLOSE_TIMEOUT = 5.0  # seconds for the process to end after its stdin has ended
_MAX_STDERR = 1 << 14  # bytes that `StderrTail` keeps; the process may write without end
_MAX_LINE = 300  # characters
# srun says so of each --cpu-bind=none without the plugin task/affinity, also with --quiet.
_NO_REASON = "srun: cluster configuration lacks support for cpu binding\n"


class ByteLink(Protocol):
    """A connection to the program.

    Attributes:
        reader: the descriptor of its output.
        writer: the descriptor of its input.
    """

    reader: int
    writer: int

    def error(self) -> str:
        """Return the last line that the program or the transport wrote on stderr."""

    def close(self) -> None:
        """Close the connection; the program and all processes below it end."""


class StderrTail:
    """Keeps the end of a child's stderr; a thread reads it, so that the child never blocks.

    Args:
        stream: the stream; it is closed at its end.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._kept = b""
        self._stream = stream
        self._thread = threading.Thread(target=self._read, name="clusterjob-stderr", daemon=True)
        self._thread.start()

    def last_line(self, timeout: float) -> str:
        """Return the last line that is not empty, at most 300 characters.

        Args:
            timeout: seconds to wait for the end of the stream; another process may keep it open.
        """
        self._thread.join(timeout)
        text = self._kept.decode(errors="replace").replace(_NO_REASON, "").strip()
        return text.rpartition("\n")[2].strip()[:_MAX_LINE]

    def _read(self) -> None:
        with self._stream:
            while part := os.read(self._stream.fileno(), 1 << 16):
                self._kept = (self._kept + part)[-_MAX_STDERR:]


class ProcessLink:
    """A connection to a child process.

    Args:
        argv: its command line.
        env: its environment.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        # In its own session Ctrl-C reaches this process alone, which forwards it.
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._errors = StderrTail(self._process.stderr)
        self._pipes = (self._process.stdin, self._process.stdout)
        self.writer, self.reader = (pipe.fileno() for pipe in self._pipes)

    def error(self) -> str:
        """Return the last line on the process's stderr, else its exit code; wait for its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        return self._errors.last_line(1.0) or (
            f"its process ended with {code}" if (code := self._process.returncode) else ""
        )

    def close(self) -> None:
        """Close the connection and wait for the process; end it after 5 s."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self._process.wait(_CLOSE_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            try:
                self._process.wait(_CLOSE_TIMEOUT)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
