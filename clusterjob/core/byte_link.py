"""The connection to a program that a backend has started inside a job: two descriptors."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping, Sequence
from typing import Protocol

from clusterjob.node.system.processes import StderrTail

_CLOSE_TIMEOUT = 5.0  # seconds for the process to end after its stdin has ended


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
