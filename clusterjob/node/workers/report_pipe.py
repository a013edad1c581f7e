"""The pipe through which a node's workers report to the forkserver; it holds lines of JSON."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from clusterjob.node.workers import forkserver_messages as messages

_MAX_MESSAGE = 4096  # characters of a worker's message


class ReportPipe:
    """The pipe of the workers' reports; every worker inherits its write end.

    Attributes:
        read_end: the descriptor that is readable when there is a report.
        ends: both descriptors.
    """

    def __init__(self) -> None:
        self.ends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.read_end = self.ends[0]
        os.set_blocking(self.ends[1], True)
        self._rest = b""

    def read(self) -> Iterator[Any]:
        """Yield the reports that have arrived; skip lines that are no report."""
        try:
            while chunk := os.read(self.read_end, 65536):
                self._rest += chunk
        except BlockingIOError:
            pass
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            try:
                message = messages.decode(messages.FROM_WORKER, line)
            except (ValueError, RecursionError):
                continue  # user code can write anything into the pipe
            if isinstance(message, messages.WorkerFailing):
                message = replace(
                    message,
                    monotonic=min(message.monotonic, time.monotonic()),
                    message=message.message[:_MAX_MESSAGE],
                    started=True,
                )
            yield message
