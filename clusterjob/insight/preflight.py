"""Read what the preflight of a job has found from the job's events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from clusterjob.node.logs.events import read_events
from clusterjob.node.logs.job_dir import EVENTS
from clusterjob.node.preflight import MAX_ROWS, table_lines
from clusterjob.node.system import codec
from clusterjob.node.system.codec import Limit, MalformedMessageError
from clusterjob.node.system.sanitize import sanitize

_MAX_LINES, _MAX_TEXT, _MAX_NAME = 20, 400, 80


@dataclass(frozen=True)
class HostTable:
    """What a preflight has measured.

    Attributes:
        columns: the measures: name, unit and median of all hosts.
        rows: the hosts, each with a part of the median per column, or None without a value.
        hosts: the number of measured hosts; there may be fewer rows.
    """

    columns: Annotated[tuple[tuple[str, str, float], ...], Limit(16)] = ()
    rows: Annotated[tuple[tuple[str, tuple[float | None, ...]], ...], Limit(MAX_ROWS)] = ()
    hosts: Annotated[int, Limit(1 << 24)] = 0

    @classmethod
    def of(cls, data: Any) -> HostTable:
        """Return the table of an event; empty if a value is wrong."""
        try:
            found = codec.read(cls, data)
        except MalformedMessageError:
            return cls()
        rows = tuple((sanitize(host)[:_MAX_NAME], cells) for host, cells in found.rows)
        columns = tuple(
            (sanitize(name)[:_MAX_NAME], sanitize(unit)[:_MAX_NAME], median)
            for name, unit, median in found.columns
        )
        return cls(columns, rows, max(len(rows), found.hosts))

    def lines(self) -> list[str]:
        """Return the table as text."""
        return table_lines(self.columns, self.rows, self.hosts)


@dataclass(frozen=True)
class PreflightFound:
    """The result of a preflight; hosts may have forged it, so it is only shown.

    Attributes:
        table: the measured values.
        slow: one line for each slow host.
        findings: one line for each other difference.
    """

    table: HostTable
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
    table = HostTable.of(last.get("table"))
    return PreflightFound(table, _lines(last.get("slow")), _lines(last.get("findings")))


def _lines(value: Any) -> list[str]:
    found = value if isinstance(value, list) else []
    return [sanitize(line)[:_MAX_TEXT] for line in found[:_MAX_LINES] if isinstance(line, str)]
