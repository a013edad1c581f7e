"""How nodes ended, written where they ended.

``ends/node<k>.json`` is an agent's word; ``ends/node<k>.refused`` that of a script that could not start one: line 1 the exit
code, line 2 ``host: why``. Two wishes of the submitting side lie beside them: ``detached``, the job lives on without it, and
``cancelled``, it is to end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clusterjob.node import files
from clusterjob.node.logs import last_lines, node_directory
from clusterjob.node.verdict import Failure


def directory(job_dir: Path) -> Path:
    """Return where the ends of a job's nodes lie."""
    return job_dir / "ends"


def detached(job_dir: Path) -> bool:
    """Return whether the job may live on without the process that submitted it."""
    return (job_dir / "detached").exists()


def detach(job_dir: Path) -> None:
    """Let the job live on without this process.

    Raises:
        OSError: the wish cannot be written.
    """
    files.write_atomic(job_dir / "detached", b"")


def cancelled(job_dir: Path) -> bool:
    """Return whether somebody wished the job to end: an agent that is only starting cannot write that down."""
    return (job_dir / "cancelled").exists()


def cancel(job_dir: Path) -> None:
    """Note the wish that the job end; a full disk, or a directory that is gone, costs the note alone."""
    try:
        files.write_atomic(job_dir / "cancelled", b"")
    except OSError:
        pass


def write(job_dir: Path, node_rank: int, end: dict[str, Any]) -> None:
    """Record a node's end.

    Raises:
        OSError: it cannot be written.
    """
    files.write_json(directory(job_dir) / f"node{node_rank}.json", end | {"node_rank": node_rank})


def written(job_dir: Path) -> list[dict[str, Any]]:
    """Return the ends that agents wrote, in the order of their nodes."""
    found = [files.read_json(path) for path in directory(job_dir).glob("node*.json")]
    return sorted((end for end in found if isinstance(end, dict)), key=lambda end: int(end.get("node_rank", 0)))


def refusals(job_dir: Path) -> list[Failure]:
    """Return the nodes whose script could not start an agent, as failures with the last lines that it printed."""
    found = []
    for path in directory(job_dir).glob("node*.refused"):
        code, _, message = path.read_text(errors="replace").strip().partition("\n")
        host, _, why = message.partition(": ")
        number = path.stem.removeprefix("node")
        if number.isdigit():
            exit_code = int(code) if code.isdigit() and int(code) else 1
            last = last_lines(node_directory(job_dir, int(number)) / "agent.log")
            found.append(Failure(None, None, int(number), host, exit_code, None, why, last))
    return sorted(found, key=lambda failure: failure.node_rank)
