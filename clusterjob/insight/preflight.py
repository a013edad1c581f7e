"""Read what the preflight of a job has found from the job's events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterjob.node.logs.events import read_events
from clusterjob.node.logs.job_dir import EVENTS
from clusterjob.node.preflight import HeatTable
from clusterjob.node.system.sanitize import sanitize

_MAX_LINES, _MAX_TEXT = 20, 400


@dataclass(frozen=True)
class PreflightFound:
    """The result of a preflight; hosts may have forged it, so it is only shown.

    Attributes:
        table: the measured values.
        slow: one line for each slow host.
        findings: one line for each other difference.
    """

    table: HeatTable
    slow: Sequence[str]
    findings: Sequence[str]


def read_preflight(job_dir: Path) -> PreflightFound | None:
    """Return the result of a job's last preflight; None if it had none."""
    last: dict[str, Any] | None = None
    for event in read_events(job_dir / EVENTS):
        if event.get("event") == "preflight":
            last = event
    if last is None:
        return None
    table = HeatTable.from_json(last.get("table"))
    return PreflightFound(table, _lines(last.get("slow")), _lines(last.get("findings")))


def _lines(value: Any) -> list[str]:
    found = value if isinstance(value, list) else []
    return [sanitize(line)[:_MAX_TEXT] for line in found[:_MAX_LINES] if isinstance(line, str)]
