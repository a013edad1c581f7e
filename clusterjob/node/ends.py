"""How nodes ended, written where they ended.

``ends/node<k>.json`` is an agent's word; ``ends/node<k>.refused`` that of a script that could not start one: line 1 the exit
code, line 2 ``host: why``.
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
