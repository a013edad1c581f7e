"""How a notebook shows jobs: state, duration and last lines as HTML."""

from __future__ import annotations

import html
from collections import Counter
from datetime import datetime
from typing import TYPE_CHECKING, Any

from clusterjob.api import waiting
from clusterjob.backends.base import Status
from clusterjob.core.records import Record
from clusterjob.errors import ClusterJobError
from clusterjob.node.logs.folding import fold
from clusterjob.node.logs.log_reader import LogReader
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import JobState

if TYPE_CHECKING:
    from clusterjob.api.jobs import Job, JobGroup

_TIMEOUT = 5.0  # seconds for the hosts' answers before the display goes on without them
_LINES, _WIDTH = 10, 500  # last lines of output, and characters of each
_ROWS = 100  # jobs of a group
_COLOURS = {
    JobState.SUCCEEDED: "#1a7f37",
    JobState.RUNNING: "#0969da",
    JobState.PENDING: "#9a6700",
}


def job_html(job: Job[Any]) -> str:
    """Return a job's state, duration and last lines; foreign text is escaped."""
    try:
        record = job._record()
        now = _status([record])[0][1]
    except ClusterJobError as error:
        return f"<pre>{_text(error.message)}</pre>"
    reader = LogReader(record.job_dir)
    reader.skip_to_tail(_LINES)
    lines = [f"[{line.label}] {line.text[:_WIDTH]}" for line in fold(reader.finish())][-_LINES:]
    output = "\n".join(_text(line) for line in lines)
    return _table([_row(record, now)]) + (f"<pre>{output}</pre>" if output else "")


def group_html(group: JobGroup[Any]) -> str:
    """Return the state and duration of each job of a group."""
    from clusterjob.api.jobs import _records

    try:
        pairs = _status(_records(group.ids))
    except ClusterJobError as error:
        return f"<pre>{_text(error.message)}</pre>"
    counts = Counter(now.state for _, now in pairs)
    shown = ", ".join(f"{count} {state}" for state, count in counts.items())
    if len(pairs) > _ROWS:
        return f"<p>{len(pairs)} jobs: {shown}</p>"
    return f"<p>{shown}</p>{_table([_row(record, now) for record, now in pairs])}"


def _status(records: list[Record]) -> list[tuple[Record, Status]]:
    try:
        return waiting.statuses(records, _TIMEOUT)
    except TimeoutError:
        why = f"no answer within {_TIMEOUT:g} s"
        return [(record, Status(JobState.UNKNOWN, why)) for record in records]


def _table(rows: list[str]) -> str:
    heads = "".join(f"<th>{name}</th>" for name in ("job", "state", "time", "nodes", "cluster"))
    return f"<table><tr>{heads}</tr>{''.join(rows)}</table>"


def _row(record: Record, now: Status) -> str:
    colour = _COLOURS.get(now.state, "#cf222e" if now.state.final else "inherit")
    reason = f" {_text(now.reason.partition(chr(10))[0][:_WIDTH])}" if now.reason else ""
    cells = (
        _text(record.job_id),
        f'<b style="color:{colour}">{_text(str(now.state))}</b>{reason}',
        _text(_duration(now)),
        str(record.nodes),
        _text(record.cluster),
    )
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _duration(now: Status) -> str:
    """Return the time from the workers' start to the end, both by node 0's clock."""
    if now.verdict is None or not now.verdict.started_at or not now.verdict.ended_at:
        return "since " + now.started_at if now.started_at else ""
    try:
        first, last = (
            datetime.fromisoformat(time.replace("Z", "+00:00"))
            for time in (now.verdict.started_at, now.verdict.ended_at)
        )
        return f"{max(0.0, (last - first).total_seconds()):.1f} s"
    except (ValueError, TypeError):
        return ""


def _text(text: str) -> str:
    return html.escape(sanitize(text))
