"""The file in a job's directory that requests another number of nodes."""

from __future__ import annotations

import contextlib
from pathlib import Path

from clusterjob.node.logs.job_dir import RESIZE
from clusterjob.node.system import files

MAX_NODES = (1 << 24) - 1
_MAX_BYTES = 16


def write(job_dir: Path, nodes: int) -> None:
    """Request a number of nodes; it replaces an earlier request that nobody has taken.

    Raises:
        OSError: the request cannot be written.
    """
    files.write_atomic(job_dir / RESIZE, f"{nodes}\n".encode())


def take(job_dir: Path) -> int | None:
    """Return the number of nodes that is requested, and remove the request; None without one."""
    path = job_dir / RESIZE
    with contextlib.suppress(OSError):
        text = files.read_regular(path, _MAX_BYTES).strip()
        path.unlink()
        if text.isdigit() and 0 < int(text) <= MAX_NODES:
            return int(text)
    return None
