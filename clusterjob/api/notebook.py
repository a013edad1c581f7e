"""How a notebook shows jobs: one table as HTML."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from clusterjob.api import waiting
from clusterjob.backends.base import Status
from clusterjob.errors import ClusterJobError
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import JobState

_TIMEOUT = 5.0  # seconds for the hosts' answers before the display goes on without them
_WIDTH = 500  # characters of a reason
_ROWS = 100


def table(ids: Sequence[str]) -> str:
    """Return the state of each job as a table; foreign text is escaped."""
    from clusterjob.api.jobs import _records

    try:
        records = _records(ids)
        pairs = waiting.statuses(records, _TIMEOUT)
    except TimeoutError:
        unknown = Status(JobState.UNKNOWN, f"no answer within {_TIMEOUT:g} s")
        pairs = [(record, unknown) for record in records]
    except ClusterJobError as error:
        return f"<pre>{html.escape(sanitize(error.message))}</pre>"
    rows = [
        (record.job_id, now.state, str(record.nodes), record.cluster, now.reason[:_WIDTH])
        for record, now in pairs[:_ROWS]
    ]
    more = [(f"and {len(pairs) - _ROWS} more",)] if len(pairs) > _ROWS else []
    return "<table>{}</table>".format(
        "".join(map(_row, [("job", "state", "nodes", "cluster", "reason"), *rows, *more]))
    )


def _row(cells: Iterable[str]) -> str:
    return "<tr>{}</tr>".format(
        "".join(f"<td>{html.escape(sanitize(cell))}</td>" for cell in cells)
    )
