"""The result of a preflight as a table: one row per host, each cell a part of the median."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clusterjob.node.system.sanitize import sanitize

THRESHOLD = 0.7  # of the median of all hosts; a host below it is slow
_MAX_ROWS = 500  # of a table; the rows with the smallest cells are kept
_MAX_SHOWN = 16  # rows of its text
_MAX_COLUMNS, _MAX_NAME = 16, 80
_MAX_AMOUNT = 1e9
_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Column:
    """One measure: its name, its unit and the median of all hosts."""

    name: str
    unit: str
    median: float

    @property
    def quantity(self) -> str:
        """The median with its unit."""
        return f"{amount_text(self.median)} {self.unit}"


@dataclass(frozen=True)
class HeatTable:
    """What a preflight has measured.

    Attributes:
        columns: the measures.
        rows: the hosts, each with a part of the median per column, or None without a value.
        hosts: the number of measured hosts; there may be fewer rows.
    """

    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[str, tuple[float | None, ...]], ...] = ()
    hosts: int = 0

    def lines(self) -> list[str]:
        """Return the table as text; with many hosts, those with the smallest cells."""
        shown = sorted(self.rows, key=lambda row: _least(row[1]))[:_MAX_SHOWN]
        if len(self.rows) <= _MAX_SHOWN:
            shown = list(self.rows)
        width = max([6, *(len(name) for name, _ in shown)])
        texts = [f"{'':{width}}  " + "  ".join(f"{each.name:>16}" for each in self.columns)]
        texts.append(
            f"{'median':{width}}  " + "  ".join(f"{each.quantity:>16}" for each in self.columns)
        )
        for name, cells in shown:
            texts.append(f"{name:{width}}  " + "  ".join(f"{_cell(cell):>16}" for cell in cells))
        if self.hosts > len(shown):
            texts.append(f"{self.hosts - len(shown)} more hosts are not shown")
        return [text.rstrip() for text in texts]

    def to_json(self) -> dict[str, Any]:
        """Return the table as plain data, for the job's events."""
        return {
            "columns": [[each.name, each.unit, each.median] for each in self.columns],
            "rows": [[name, list(cells)] for name, cells in self.rows],
            "hosts": self.hosts,
        }

    @classmethod
    def from_json(cls, data: Any) -> HeatTable:
        """Return the table that `to_json` wrote; empty if a value is wrong: a host may forge it."""
        try:
            columns = tuple(
                Column(_text(name), _text(unit), _number(median))
                for name, unit, median in data["columns"][:_MAX_COLUMNS]
            )
            rows = tuple(
                (_text(name), tuple(None if cell is None else _number(cell) for cell in cells))
                for name, cells in data["rows"]
            )
            rows = rows if len(rows) <= _MAX_ROWS else tuple(sorted(rows, key=_of_row)[:_MAX_ROWS])
            hosts = max(len(rows), int(_number(data["hosts"])))
        except (KeyError, TypeError, ValueError):
            return cls()
        if any(len(cells) != len(columns) for _, cells in rows):
            return cls()
        return cls(columns, rows, hosts)


def level_of(cell: float | None) -> int:
    """Return the level of a cell from 0 (nothing) to 7 (the median or more)."""
    return 7 if cell is None else max(0, min(7, math.ceil(cell * 8 - 0.5) - 1))


def amount_text(amount: float) -> str:
    """Return an amount with three digits."""
    return f"{amount:.0f}" if amount >= 100 else f"{amount:.3g}"


def is_slow(cell: float | None) -> bool:
    """Return whether a cell is below the threshold."""
    return cell is not None and cell < THRESHOLD


def _cell(cell: float | None) -> str:
    return "-" if cell is None else f"{cell:.2f} {_BLOCKS[level_of(cell)]}"


def _of_row(row: tuple[str, tuple[float | None, ...]]) -> float:
    return _least(row[1])


def _least(cells: Sequence[float | None]) -> float:
    return min((cell for cell in cells if cell is not None), default=math.inf)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return sanitize(value)[:_MAX_NAME]


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _MAX_AMOUNT:
        raise ValueError("not a number from 0")
    return float(value)
