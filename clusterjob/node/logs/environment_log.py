"""Record a node's detected environment and its versions, once per attempt, for the report.

Each line of ``logs/node<k>/environment.jsonl`` is one attempt: what ``clusterjob env`` shows, and
the versions of the programs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clusterjob.node.logs.events import read_events
from clusterjob.node.logs.job_dir import ENVIRONMENT
from clusterjob.node.logs.log_files import node_directory
from clusterjob.node.system.files import Appender

_TORCH = re.compile(r"^(?:__version__|(cuda|hip))\b[^=\n]*= '([^'\n]{1,60})'", re.MULTILINE)
_DRIVER = Path("/sys/module/nvidia/version")


def add(job_dir: Path, node_rank: int, detected: dict[str, Any], *, attempt: int) -> None:
    """Append the environment of one attempt; a full disk loses it.

    Args:
        job_dir: the job's directory.
        node_rank: the node.
        detected: the result of `clusterjob.node.environments.show.describe`.
        attempt: the number of the job's attempt, from 0.
    """
    line = {
        "attempt": attempt,
        "host": os.uname().nodename,
        "detected": detected,
        "versions": versions(),
    }
    with contextlib.suppress(OSError):
        Appender(node_directory(job_dir, node_rank) / ENVIRONMENT).write(
            (json.dumps(line) + "\n").encode()
        )


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of this node's programs, without an import of torch."""
    found = {
        "clusterjob": sys.modules["clusterjob"].__version__,
        "Python": f"{sys.version.split()[0]} ({sys.executable})",
        "kernel": f"{os.uname().sysname} {os.uname().release} {os.uname().machine}",
    }
    with contextlib.suppress(OSError, ValueError, ImportError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin is not None:
            text = Path(spec.origin).with_name("version.py").read_text()
            found |= {match[1] or "torch": match[2] for match in _TORCH.finditer(text)}
    with contextlib.suppress(OSError):
        found["NVIDIA driver"] = _DRIVER.read_text().strip()
    return found


def read(job_dir: Path, node_rank: int) -> Iterator[dict[str, Any]]:
    """Yield the recorded environments of a node, the oldest first; skip malformed lines."""
    for line in read_events(node_directory(job_dir, node_rank) / ENVIRONMENT):
        if isinstance(line.get("detected"), dict) and isinstance(line.get("versions"), dict):
            yield line
