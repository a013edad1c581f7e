"""Read the stderr of a child process to its end, and keep the last bytes."""

from __future__ import annotations

import os
import threading
from typing import IO

_MAX_BYTES = 1 << 14  # kept bytes; the process may write without end
_MAX_LINE = 300  # characters
# srun says so of each --cpu-bind=none without the plugin task/affinity, also with --quiet.
_NO_REASON = "srun: cluster configuration lacks support for cpu binding\n"


class StderrTail:
    """Reads a stream in a thread, so that the process never blocks.

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
                self._kept = (self._kept + part)[-_MAX_BYTES:]
