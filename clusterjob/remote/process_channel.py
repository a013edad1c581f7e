"""A byte stream over the stdin and stdout of a process on this machine."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import time
from collections.abc import Sequence

_MAX_STDERR = 1 << 16  # kept bytes of the process's stderr


class ProcessChannel:
    """The stdin and stdout of a process, such as `ssh HOST COMMAND`.

    Args:
        argv: the command of that process.
        timeout: seconds that a call waits.
    """

    def __init__(self, argv: Sequence[str], timeout: float) -> None:
        self._timeout = timeout
        self._stderr = bytearray()
        self._stream, theirs = socket.socketpair()
        self._errors, their_errors = socket.socketpair()
        with theirs, their_errors:
            try:
                self._process = subprocess.Popen(
                    argv,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=their_errors.fileno(),
                    start_new_session=True,
                )
            except BaseException:
                self._stream.close()
                self._errors.close()
                raise
        self._stream.setblocking(False)
        self._errors.setblocking(False)
        self._errors_end = False

    @property
    def _closed(self) -> bool:
        """Whether `close` was called; paramiko asks its socket."""
        return self._stream.fileno() < 0

    @property
    def closed(self) -> bool:
        """Whether the command has ended or the channel is closed."""
        return self._closed or self._process.poll() is not None

    def settimeout(self, seconds: float) -> None:
        """Set the timeout of the next calls."""
        self._timeout = seconds

    def recv(self, size: int) -> bytes:
        """Return some bytes of stdout; empty at the end."""
        self._wait(select.POLLIN)
        return self._stream.recv(size)

    def send(self, data: bytes) -> int:
        """Write some of the bytes to stdin and return how many."""
        self._wait(select.POLLOUT)
        return self._stream.send(data)

    def shutdown_write(self) -> None:
        """Close the command's stdin."""
        self._stream.shutdown(socket.SHUT_WR)

    def read_stderr(self) -> bytes:
        """Return what arrived on stderr since the last call; the end, if it is long."""
        self._read_errors()
        text, self._stderr = bytes(self._stderr), bytearray()
        return text

    def wait_for_exit(self) -> int:
        """Return the command's exit code."""
        try:
            return self._process.wait(self._timeout)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError from error

    def close(self) -> None:
        """Close the channel."""
        self._stream.close()
        self._errors.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the process did not start
            self.close()

    def _wait(self, event: int) -> None:
        """Wait until the stream is ready; read stderr meanwhile, so that the host never blocks."""
        end = time.monotonic() + self._timeout
        while True:
            poll = select.poll()
            try:
                poll.register(self._stream, event)
                if not self._errors_end:
                    poll.register(self._errors, select.POLLIN)
            except ValueError as error:
                raise ConnectionError("the channel is closed") from error
            left = end - time.monotonic()
            ready = dict(poll.poll(left * 1000)) if left > 0 else {}
            if not ready:
                raise TimeoutError
            if self._errors.fileno() in ready:
                self._read_errors()
            if self._stream.fileno() in ready:
                return

    def _read_errors(self) -> None:
        with contextlib.suppress(OSError):  # nothing to read, or closed
            data = self._errors.recv(_MAX_STDERR)
            self._errors_end = not data
            self._stderr += data
            del self._stderr[:-_MAX_STDERR]
