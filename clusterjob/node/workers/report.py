"""A worker's own words to its starter: that it fails, at the moment when it does, and for whom it
waits.
"""

from __future__ import annotations

import json
import os
import time

_MOST_NAMED = 8  # ranks of which one question asks

# The longest write that a pipe takes whole, whoever else writes to it (pipe(7) promises 4096 on
# Linux).
_WHOLE_WRITE = 4096


def report(report_fd: int, local_rank: int, message: str, exit_code: int) -> None:
    """Tell the starter, at this moment, that the worker fails: its exit may follow much later.

    One write that a pipe takes whole, so that lines of many workers do not mix.

    Args:
        report_fd: the write end of the starter's report pipe.
        local_rank: the worker.
        message: what went wrong, one line.
        exit_code: what the worker is going to return.
    """

    def encode(text: str) -> bytes:
        line = {
            "local_rank": local_rank,
            "monotonic": time.monotonic(),
            "message": text,
            "exit_code": exit_code,
        }
        return (json.dumps(line) + "\n").encode()

    line = encode(message)
    if len(line) > _WHOLE_WRITE:
        line = encode(message[:300])
    try:
        os.write(report_fd, line)
    except OSError:
        pass  # the starter is gone, and so shall this worker be


def ask(report_fd: int, local_rank: int, missing: list[int], *, final: bool) -> None:
    """Have the agents look for workers that this one waits for; what they find goes into this
    worker's stderr.

    Args:
        report_fd: the write end of the starter's report pipe.
        local_rank: the worker that waits.
        missing: the ranks that it waits for.
        final: whether it gives up now.
    """
    line = {"local_rank": local_rank, "missing": missing[:_MOST_NAMED], "final": final}
    try:
        os.write(report_fd, (json.dumps(line) + "\n").encode())
    except OSError:
        pass  # the starter is gone, and so shall this worker be
