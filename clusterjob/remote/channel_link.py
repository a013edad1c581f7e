"""Connect a byte stream of a session, such as an SSH channel, to two descriptors."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

from clusterjob.remote.transport import ByteStream

_CHUNK = 1 << 15
_POLL = 3600.0  # seconds of one wait for data; the user of the link notices a dead peer itself
_JOIN = 5.0  # seconds for a thread to end


class ChannelLink:
    """A `clusterjob.core.byte_link.ByteLink` over a stream; two threads copy the bytes.

    Args:
        stream: the stream.
        error: returns the last line that the host wrote on stderr.
    """

    def __init__(self, stream: ByteStream, error: Callable[[], str]) -> None:
        self._stream, self._error = stream, error
        stream.settimeout(_POLL)
        self.reader, received = os.pipe()
        outgoing, self.writer = os.pipe()
        self._threads = [
            threading.Thread(target=work, args=(end,), name="clusterjob-link", daemon=True)
            for work, end in ((self._receive, received), (self._send, outgoing))
        ]
        for thread in self._threads:
            thread.start()

    def error(self) -> str:
        """Return the last line that the host wrote on stderr."""
        return self._error()

    def close(self) -> None:
        """Close the stream; the host's process then ends."""
        for each in (self.writer, self.reader):
            os.close(each)
        for thread in self._threads:
            thread.join(_JOIN)

    def _receive(self, pipe: int) -> None:
        try:
            while True:
                try:
                    data = self._stream.recv(_CHUNK)
                except TimeoutError:
                    continue
                if not data:
                    return
                _write(pipe, data)
        except Exception:  # the connection broke, or the reader is closed; both see the end
            return
        finally:
            os.close(pipe)

    def _send(self, pipe: int) -> None:
        try:
            while data := os.read(pipe, _CHUNK):
                while data:
                    with contextlib.suppress(TimeoutError):
                        count = self._stream.send(data)
                        if not count:
                            return
                        data = data[count:]
        except Exception:  # as above
            return
        finally:
            os.close(pipe)
            self._stream.close()


def _write(pipe: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(pipe, view) :]
