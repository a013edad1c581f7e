"""Reports of workers to their forkserver: a failure, or ranks that a worker waits for.

The workers write lines of JSON into one pipe, which the forkserver reads.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from clusterjob.node.workers import forkserver_messages as messages

# Maximum bytes of an atomic write to a pipe (pipe(7): 4096 on Linux).
_ATOMIC_WRITE = 4096
_SHORT_MESSAGE = 300  # characters of a message that does not fit
_MAX_MESSAGE = 4096  # characters of a worker's message
# Maximum bytes of one reading: a worker may write without end. It is the largest size of a pipe.
_MAX_READ = 1 << 20
_MAX_REST = 1 << 16  # bytes of a line without an end


def report(
    report_fd: int,
    local_rank: int,
    *,
    message: str,
    exit_code: int,
    kind: str = "",
    where: str = "",
) -> None:
    """Report a failure of this worker at once: its exit may follow much later.

    Args:
        report_fd: the write end of the forkserver's report pipe.
        local_rank: the worker's index on the node.
        message: the error, one line.
        exit_code: the exit code that the worker will have.
        kind: the `FailureKind`; empty if it is unknown.
        where: the file and line of the error; empty if it is unknown.
    """
    failing = messages.WorkerFailing(
        local_rank, time.monotonic(), message=message, exit_code=exit_code, kind=kind, where=where
    )
    if len(_line(failing)) > _ATOMIC_WRITE:
        short = message[:_SHORT_MESSAGE]
        failing = replace(failing, message=short, where=where[:_SHORT_MESSAGE])
    _write(report_fd, failing)


def report_missing(report_fd: int, local_rank: int, missing: list[int], *, final: bool) -> None:
    """Ask the agents about ranks that this worker waits for.

    The agents write their answers into this worker's stderr.

    Args:
        report_fd: the write end of the forkserver's report pipe.
        local_rank: the index on the node of the worker that waits.
        missing: the ranks that it waits for.
        final: whether it gives up now.
    """
    ranks = tuple(missing[: messages.MAX_NAMED])
    _write(report_fd, messages.WorkerWaiting(local_rank, ranks, final=final))


def report_alive(report_fd: int, local_rank: int, step: int) -> None:
    """Report that this worker makes progress; `step` is -1 if the program gave none."""
    _write(report_fd, messages.WorkerAlive(local_rank, step))


def _line(message: Any) -> bytes:
    return messages.encode(messages.FROM_WORKER, message) + b"\n"


def _write(report_fd: int, message: Any) -> None:
    """Write a message as one line, at once: the lines of several workers must not mix."""
    with contextlib.suppress(OSError):  # the forkserver has ended; the kernel kills this worker too
        os.write(report_fd, _line(message))


class ReportPipe:
    """The forkserver's side of the pipe; every worker inherits the write end.

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
        data = self._rest
        with contextlib.suppress(BlockingIOError):
            while len(data) < _MAX_READ and (chunk := os.read(self.read_end, 65536)):
                data += chunk
        *lines, rest = data.split(b"\n")
        self._rest = rest if len(rest) <= _MAX_REST else b""
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
                    where=message.where[:_SHORT_MESSAGE],
                    started=True,
                )
            yield message
