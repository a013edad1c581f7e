"""Reports from a worker to its forkserver: a failure, or ranks that the worker waits for."""

from __future__ import annotations

import os
import time
from typing import Any

from clusterjob.node.workers import forkserver_messages as messages

# The longest write to a pipe that is atomic (pipe(7): 4096 bytes on Linux).
_ATOMIC_WRITE = 4096
_SHORT_MESSAGE = 300  # characters of a message that does not fit


def report(
    report_fd: int, local_rank: int, *, message: str, exit_code: int, kind: str = ""
) -> None:
    """Report a failure of this worker at once: its exit may follow much later.

    Args:
        report_fd: the write end of the forkserver's report pipe.
        local_rank: the worker's index on the node.
        message: the error, one line.
        exit_code: the exit code that the worker will have.
        kind: the `FailureKind`; empty if it is unknown.
    """
    failing = messages.WorkerFailing(
        local_rank, time.monotonic(), message=message, exit_code=exit_code, kind=kind
    )
    line = _line(failing)
    if len(line) > _ATOMIC_WRITE:
        line = _line(
            messages.WorkerFailing(
                local_rank,
                failing.monotonic,
                message=message[:_SHORT_MESSAGE],
                exit_code=exit_code,
                kind=kind,
            )
        )
    _write(report_fd, line)


def report_missing(report_fd: int, local_rank: int, missing: list[int], *, final: bool) -> None:
    """Request the agents' answers about ranks that this worker waits for.

    The agents write their answers into this worker's stderr.

    Args:
        report_fd: the write end of the forkserver's report pipe.
        local_rank: the index on the node of the worker that waits.
        missing: the ranks that it waits for.
        final: whether it gives up now.
    """
    ranks = tuple(missing[: messages.MAX_NAMED])
    _write(report_fd, _line(messages.WorkerWaiting(local_rank, ranks, final=final)))


def _line(message: Any) -> bytes:
    return messages.encode(messages.FROM_WORKER, message) + b"\n"


def _write(report_fd: int, line: bytes) -> None:
    """Write a line at once, so that the lines of several workers do not mix."""
    try:
        os.write(report_fd, line)
    except OSError:
        pass  # the forkserver has ended; the kernel kills this worker too
