"""The table of jobs that `list` and `status` print: its columns, arrays as one line."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from clusterjob.cli import tables
from clusterjob.core.times import show_age, show_duration, show_local
from clusterjob.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from clusterjob.core.record_index import ListRow

# The text of each column for a row. SUBMITTED is an age on a terminal; see `cells`.
COLUMNS: dict[str, Callable[[ListRow], str]] = {
    "id": lambda row: row.job_id,
    "name": lambda row: row.name,
    "state": lambda row: row.state,
    "code": lambda row: row.exit_code,
    "nodes": lambda row: row.nodes,
    "cluster": lambda row: row.cluster,
    "backend": lambda row: row.backend,
    "submitted": lambda row: show_local(row.submitted_at),
    "started": lambda row: show_local(row.started_at),
    "ended": lambda row: show_local(row.ended_at),
    "duration": lambda row: "" if row.seconds is None else show_duration(row.seconds),
    "backend_id": lambda row: row.backend_id,
    "hosts": lambda row: row.hosts,
    "restarts": lambda row: str(row.restarts),
    "values": lambda row: row.values,
    "reason": lambda row: row.reason,
}
DEFAULT = ("id", "state", "code", "nodes", "cluster", "submitted", "duration", "reason")


def parse_columns(text: str) -> tuple[str, ...]:
    """Return the columns of ``--columns``.

    Raises:
        UsageError: there is no such column.
    """
    names = tuple(name.strip().lower() for name in text.split(","))
    for name in names:
        if name not in COLUMNS:
            raise UsageError(
                f"--columns {text}: there is no column {name!r}",
                did_you_mean(name, COLUMNS, f"the columns are {', '.join(COLUMNS)}"),
            )
    return names


def cells(
    rows: Sequence[ListRow],
    columns: Sequence[str] = DEFAULT,
    *,
    together: bool = False,
    ages: bool = False,
) -> list[tuple[str, ...]]:
    """Return the table's cells, the header first.

    Args:
        rows: the jobs; the elements of an array are adjacent.
        columns: names of the columns.
        together: return one row per array, with the number of elements in each state.
        ages: whether the time of submission is an age.
    """
    if columns == DEFAULT and any(row.values for row in rows):
        columns = (*DEFAULT[:-1], "values", DEFAULT[-1])
    table = [tuple(name.upper() for name in columns)]
    for listed_id, group in itertools.groupby(
        rows, lambda row: (together and row.array_id) or row.job_id
    ):
        members = list(group)
        row = members[0] if listed_id == members[0].job_id else whole_array(listed_id, members)
        table.append(
            tuple(
                show_age(row.submitted_at) if name == "submitted" and ages else COLUMNS[name](row)
                for name in columns
            )
        )
    return table


def whole_array(array_id: str, elements: Sequence[ListRow]) -> ListRow:
    """Return one row for all elements of an array."""
    counts = Counter(row.state for row in elements)
    code = next(
        (row.exit_code for row in elements if row.exit_code not in ("", "0")), elements[0].exit_code
    )
    return elements[0]._replace(
        job_id=array_id,
        state=next(iter(counts)) if len(counts) == 1 else "MIXED",
        exit_code=code,
        reason=", ".join(f"{count} {name}" for name, count in counts.items()),
        started_at="",
        ended_at="",
        seconds=None,
        values=" ... ".join(dict.fromkeys((elements[0].values, elements[-1].values))),
    )


def print_jobs(
    rows: Sequence[ListRow],
    columns: Sequence[str] = DEFAULT,
    *,
    together: bool = False,
    fit: bool = False,
) -> None:
    """Print jobs as a table on stdout; `fit` cuts its lines to the width of a terminal."""
    ages = tables.terminal_size() is not None
    tables.print_table(cells(rows, columns, together=together, ages=ages), fit=fit)
