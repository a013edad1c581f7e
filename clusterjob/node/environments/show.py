"""Implement ``clusterjob env``: show the detected environment as plain data or as text.

It works on a node that has only the node zip.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

from clusterjob.node.environments import detection, lookups
from clusterjob.node.environments.reading import Finding
from clusterjob.node.environments.topology import Topology, Worker
from clusterjob.node.system.sanitize import sanitize

SCHEMA = 1


def describe(finding: Finding) -> dict[str, Any]:
    """Return a finding as plain data; a field that its level does not have is None."""
    placement = finding.placement
    worker = placement if isinstance(placement, Worker) else None
    topology: Topology | None = (
        worker.topology if worker else placement if isinstance(placement, Topology) else None
    )
    return {
        "source": finding.source,
        "level": finding.level,
        "nnodes": topology.nnodes if topology else None,
        "node_rank": topology.node_rank if topology else None,
        "nproc_per_node": topology.nproc_per_node if topology else None,
        "master_addr": topology.master_addr if topology else None,
        "master_port": topology.master_port if topology else None,
        "rank": worker.rank if worker else None,
        "local_rank": worker.local_rank if worker else None,
        "world_size": worker.world_size if worker else None,
        "local_world_size": worker.local_world_size if worker else None,
        "evidence": dict(finding.evidence),
        "ignored": [{"variable": item.variable, "why": item.why} for item in finding.ignored],
        "conflicts": list(finding.conflicts),
    }


_FIELDS = (
    "nnodes", "node_rank", "nproc_per_node", "master_addr", "master_port", "rank", "local_rank",
    "world_size", "local_world_size",
)  # fmt: skip


def text(found: dict[str, Any]) -> str:
    """Return the data of `describe` as text: each field with its value and its variable."""
    lines = [f"source: {found['source']}   level: {found['level']}"]
    rows = [
        (name, str(found[name]), found["evidence"].get(name, ""))
        for name in _FIELDS
        if found[name] is not None
    ]
    if rows:
        lines += _table([("FIELD", "VALUE", "FROM"), *rows])
    lines += [f"ignored: {item['variable']} ({item['why']})" for item in found["ignored"]]
    lines += [f"conflict: {conflict}" for conflict in found["conflicts"]]
    return "\n".join(sanitize(line) for line in lines)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def main(argv: Sequence[str]) -> int:
    """Print the detected environment.

    Args:
        argv: the arguments after ``env`` on the command line.

    Returns:
        The exit code: 1 if the variables are incomplete or contradict each other, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="clusterjob env",
        description="Show the detected environment: the variable that gave each field, ignored "
        "variables and conflicts.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
    return show(as_json=parser.parse_args(argv).as_json)


def show(*, as_json: bool) -> int:
    """Print the detected environment; return the exit code: 1 if there is a conflict, else 0."""
    found = describe(detection.detect(lookups.look_up(os.environ)))
    if as_json:
        # ASCII only, so that any encoding of stdout can represent it.
        print(json.dumps({"schema": SCHEMA, **found}, indent=1))
    else:
        print(text(found))
    return 1 if found["conflicts"] else 0
