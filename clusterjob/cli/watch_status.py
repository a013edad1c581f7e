"""The view of ``status --watch``: one row per job with its phase, which follows changes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from clusterjob.cli import job_table, redraw, tables
from clusterjob.cli.phase_text import PhaseClock, phase_text
from clusterjob.core import polling
from clusterjob.core.listing import row_of
from clusterjob.node.logs.job_dir import TIMELINE
from clusterjob.node.logs.log_files import node_directory
from clusterjob.node.system import files
from clusterjob.node.verdict import JobState

if TYPE_CHECKING:
    from clusterjob.backends.base import Status
    from clusterjob.core.record_index import ListRow
    from clusterjob.core.records import Record

_COLUMNS = ("id", "state", "code", "nodes", "cluster", "duration")
_LESS = ("nodes", "cluster", "code", "duration")  # left out, in this order, for the phase
_PHASE_WIDTH = 24  # columns of the terminal that the phase has at least
_INTERVAL = 0.5  # seconds between two polls of the jobs
_MAX_NODES = 64  # maximum nodes whose output is checked


def show(wanted: Sequence[Record]) -> bool:
    """Show jobs until they have all ended, or until Ctrl-C.

    Args:
        wanted: the jobs; empty for all that have not ended, which are followed without an end.

    Returns:
        Whether all the jobs have ended.
    """
    view = _View(wanted)
    return redraw.show(view.lines, is_over=view.is_over, interval=_INTERVAL)


def _columns_for(rows: Sequence[ListRow], width: int) -> Sequence[str]:
    """Return the columns that leave room for the phase on a line of this width."""
    columns = list(_COLUMNS)
    for less in _LESS:
        lines = tables.table_lines(job_table.cells(rows, columns))
        if max(map(tables.width_of, lines)) + _PHASE_WIDTH < width:
            break
        columns.remove(less)
    return columns


class _View:
    """The table of some jobs, and the times of their output."""

    def __init__(self, wanted: Sequence[Record]) -> None:
        self._wanted = wanted
        self._clocks: dict[str, PhaseClock] = {}
        self._sizes: dict[str, int] = {}  # bytes of the timelines, by job
        self._over = False

    def is_over(self) -> bool:
        """Return whether all jobs had ended when `lines` was called."""
        return self._over

    def lines(self, size: os.terminal_size | None) -> list[str]:
        """Return the table; without a terminal, only what changes with a phase."""
        pairs = polling.statuses(self._wanted) if self._wanted else polling.unfinished()
        self._over = bool(self._wanted) and all(now.verdict is not None for _, now in pairs)
        rows = [row_of(record, now) for record, now in pairs]
        texts = [self._text(record, now, steady=size is None) for record, now in pairs]
        columns = _COLUMNS[:-1] if size is None else _columns_for(rows, size.columns)
        table = job_table.cells(rows, columns)
        table = [(*cells, text) for cells, text in zip(table, ["PHASE", *texts], strict=True)]
        if size is None:
            return tables.table_lines(table)
        lines = tables.table_lines(table, size.columns)
        room = max(1, size.lines - 1)
        return [*lines[:room], *([f"and {len(lines) - room} more"] if len(lines) > room else [])]

    def _text(self, record: Record, status: Status, *, steady: bool) -> str:
        if status.verdict is not None or status.state is JobState.UNKNOWN:
            return status.reason.partition("\n")[0]
        clock = self._clocks.setdefault(record.job_id, PhaseClock())
        size = self._output_size(record)
        if size > self._sizes.get(record.job_id, 0):
            clock.hear()
        self._sizes[record.job_id] = size
        return phase_text(status, has_output=clock.has_output) if steady else clock.text(status)

    def _output_size(self, record: Record) -> int:
        """Return a number that grows with the job's output: the bytes of its timelines."""
        if self._wanted:  # the logs of all jobs may be large
            polling.collect(record)
        return sum(
            files.size_of(node_directory(record.job_dir, node) / TIMELINE)
            for node in range(min(record.nodes, _MAX_NODES))
        )
