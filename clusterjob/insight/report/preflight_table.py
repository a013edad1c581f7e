"""Turn the result of a preflight into the values of the report's table of hosts."""

from __future__ import annotations

from typing import Any

from clusterjob.insight.preflight import PreflightFound
from clusterjob.node.preflight import THRESHOLD, least, quantity


def rows(found: PreflightFound | None) -> dict[str, Any] | None:
    """Return the columns, and the rows with text and mark of each cell; None without any."""
    if found is None or not found.table.rows:
        return None
    hosts = sorted(found.table.rows, key=least)
    return {
        "columns": [(name, quantity(median, unit)) for name, unit, median in found.table.columns],
        "rows": [
            (
                name,
                [
                    ("–", False) if cell is None else (f"{cell:.2f}", cell < THRESHOLD)
                    for cell in cells
                ],
            )
            for name, cells in hosts
        ],
        "more": found.table.hosts - len(hosts),
        "slow": found.slow,
        "findings": found.findings,
    }
