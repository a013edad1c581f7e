"""Draw the timeline of every rank: one row each, grouped by node, with the job's events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clusterjob.core.times import show_duration
from clusterjob.insight.job_times import Mark, Span
from clusterjob.insight.report import svg
from clusterjob.insight.report.data import Rank, ReportData

FRAME = svg.WIDE
MAX_ROWS = 512
PHASES = ("setup", "import", "rendezvous", "init", "running", "stop")
# What is drawn later covers what is drawn earlier: short phases must stay visible.
_DRAWN = ("running", "setup", "import", "init", "rendezvous", "stop")
_TOP = 34  # the row with the numbers of the events
_MAX_RUNS = 24_000  # of all rows; with more, the columns become wider


def shown_ranks(data: ReportData) -> list[Rank]:
    """Return the ranks that have a row: all, or the failed ones and as many others as fit."""
    if len(data.ranks) <= MAX_ROWS:
        return list(data.ranks)
    failed = [rank for rank in data.ranks if rank.failed or (rank.message and not rank.consequence)]
    others = [rank for rank in data.ranks if rank not in failed]
    kept = failed[: MAX_ROWS // 2]
    return sorted(kept + others[: MAX_ROWS - len(kept)], key=lambda rank: rank.rank)


def _row_height(rows: int) -> float:
    """Return the height of one row, so that the picture stays readable."""
    return 20 if rows <= 16 else 12 if rows <= 40 else 7 if rows <= 96 else 4 if rows <= 160 else 3


def _places(ranks: Sequence[Rank], height: float) -> tuple[dict[int, float], float]:
    """Return the top of each rank's row, and the height of all; nodes have a gap between them."""
    gap = 4 if height >= 7 else 2
    tops: dict[int, float] = {}
    y = 0.0
    previous = None
    for rank in sorted(ranks, key=lambda rank: (rank.node, rank.rank)):
        if previous not in (None, rank.node):
            y += gap
        tops[rank.rank], previous = y, rank.node
        y += height
    return tops, y


def _row_labels(
    ranks: Sequence[Rank],
    hosts: Mapping[int, str],
    tops: Mapping[int, float],
    height: float,
    y: float,
) -> str:
    """Return the labels left of rows: ranks if they fit, else nodes; the failed rank always."""
    parts = []
    last = -100.0
    named: set[int] = set()
    failed = [tops[rank.rank] + height / 2 for rank in ranks if rank.failed]
    for rank in sorted(ranks, key=lambda rank: tops[rank.rank]):
        middle = tops[rank.rank] + height / 2
        if rank.failed:
            parts.append(
                f'<text class="lab bad" x="{FRAME.left - 6}" y="{svg.number(y + middle + 4)}"'
                f' text-anchor="end">rank {rank.rank} ✕</text>'
            )
            continue
        near = any(abs(middle - other) < 13 for other in failed)
        text = ""
        if height >= 12:
            text = rank.name
        elif rank.node not in named:
            text = f"node {rank.node} {hosts.get(rank.node, '')}"[:18]
        if text and middle - last >= 11 and not near:
            named.add(rank.node)
            last = middle
            parts.append(
                f'<text class="lab" x="{FRAME.left - 6}" y="{svg.number(y + middle + 4)}"'
                f' text-anchor="end">{svg.escape(text)}</text>'
            )
    return "".join(parts)


def draw(data: ReportData) -> str:
    """Return the picture; empty if no rank has a phase."""
    ranks = [rank for rank in shown_ranks(data) if rank.spans]
    started = {rank.node for rank in ranks}
    ranks += [  # a node whose workers have not started has a row of its own
        Rank(-1 - node.rank, node.rank, node.spans)
        for node in data.nodes[:MAX_ROWS]
        if node.spans and node.rank not in started
    ]
    if not ranks or data.end <= 0:
        return ""
    height = _row_height(len(ranks))
    tops, total = _places(ranks, height)
    hosts = {node.rank: node.host for node in data.nodes}
    bottom = _TOP + total
    paths: dict[str, list[str]] = {phase: [] for phase in _DRAWN}
    columns = FRAME.plot
    while True:
        runs = {rank.rank: _runs(rank.spans, data.end, columns) for rank in ranks}
        if sum(map(len, runs.values())) <= _MAX_RUNS or columns <= 50:
            break
        columns //= 2
    for rank in ranks:
        middle = svg.number(_TOP + tops[rank.rank] + height / 2)
        for phase, first, count in runs[rank.rank]:
            x = FRAME.left + first * FRAME.plot / columns
            wide = svg.number(count * FRAME.plot / columns)
            paths[phase].append(f"M{svg.number(x)} {middle}h{wide}")
    thick = svg.number(height - (2 if height >= 12 else 0.4))
    parts = [
        FRAME.open(
            bottom + 22,
            f"Timeline of {len(ranks)} ranks",
            "One row per rank, grouped by node: its phases over time. The table below has the"
            " same data.",
            "timeline",
        ),
        FRAME.axis(data.end, _TOP - 6, bottom),
        *(
            f'<path class="p-{phase}" stroke-width="{thick}" d="{"".join(pieces)}"/>'
            for phase, pieces in paths.items()
            if pieces
        ),
        _failures(ranks, data.end, tops, height),
        _row_labels(ranks, hosts, tops, height, _TOP),
        _marks(data.marks, data.end, bottom),
        _titles(ranks, hosts, tops, height),
        "</svg>",
    ]
    return "".join(parts)


def _runs(spans: Sequence[Span], end: float, columns: int) -> list[tuple[str, int, int]]:
    """Return the phases in whole columns, as phase, first column and number of columns.

    Of the phases in one column, the one that `_DRAWN` names last is kept.
    """
    cells: dict[int, str] = {}
    wide: list[tuple[str, int, int]] = []
    for phase in _DRAWN:
        for span in spans:
            if span.phase != phase or span.end <= span.begin:
                continue
            first = min(columns - 1, int(span.begin / end * columns))
            last = min(columns, max(first + 1, round(span.end / end * columns)))
            if phase == "running":
                wide.append((phase, first, last - first))  # lies below all others
            else:
                cells.update(dict.fromkeys(range(first, last), phase))
    found = wide
    for column in sorted(cells):
        phase = cells[column]
        if found and found[-1][0] == phase and sum(found[-1][1:]) == column:
            found[-1] = (phase, found[-1][1], found[-1][2] + 1)
        else:
            found.append((phase, column, 1))
    return found


def _failures(ranks: Sequence[Rank], end: float, tops: Mapping[int, float], height: float) -> str:
    """Return a cross where a rank failed on its own; the root cause has a larger one."""
    parts = []
    for rank in ranks:
        if rank.message and not rank.consequence:
            x, y = FRAME.x_of(rank.spans[-1].begin, end), _TOP + tops[rank.rank] + height / 2
            r = 6 if rank.failed else 3
            parts.append(
                f'<path class="cross" d="M{svg.number(x - r)} {svg.number(y - r)}l{2 * r} {2 * r}'
                f'm0 {-2 * r}l{-2 * r} {2 * r}"/>'
            )
    return "".join(parts)


def _marks(marks: Sequence[Mark], end: float, bottom: float) -> str:
    """Return a vertical line with a number for each event; numbers that overlap are left out."""
    parts = []
    line = last = -100.0
    for index, mark in enumerate(marks, 1):
        x = FRAME.x_of(mark.time, end)
        if x - line < 2:  # the table has all events
            continue
        line = x
        title = svg.escape(f"{index}. {mark.name} at {svg.clock(mark.time)}: {mark.text}")
        parts.append(
            f'<g class="mark"><title>{title}</title>'
            f'<path d="M{svg.number(x)} {_TOP - 8}V{svg.number(bottom)}"/>'
        )
        if x - last >= 17:
            last = x
            parts.append(
                f'<circle cx="{svg.number(x)}" cy="{_TOP - 16}" r="8"/>'
                f'<text x="{svg.number(x)}" y="{_TOP - 12}" text-anchor="middle">{index}</text>'
            )
        parts.append("</g>")
    return "".join(parts)


def _titles(
    ranks: Sequence[Rank], hosts: Mapping[int, str], tops: Mapping[int, float], height: float
) -> str:
    """Return a transparent rectangle over each row, whose title a pointer shows."""
    return "".join(
        f'<rect class="hit" x="{FRAME.left}" width="{FRAME.plot}" height="{svg.number(height)}" '
        f'y="{svg.number(_TOP + tops[rank.rank])}"><title>{svg.escape(summary(rank, hosts))}'
        "</title></rect>"
        for rank in ranks
    )


def summary(rank: Rank, hosts: Mapping[int, str]) -> str:
    """Return one line about a rank: where it ran, the seconds of its phases, how it ended."""
    where = f"{rank.name}, node {rank.node} {hosts.get(rank.node, '')}".rstrip()
    parts = [f"{phase} {show_duration(seconds)}" for phase, seconds in times(rank).items()]
    how = rank.message or (rank.spans[-1].detail if rank.spans else "")
    return f"{where}: {', '.join(parts)}{'; ' + how[:160] if how else ''}"


def times(rank: Rank) -> dict[str, float]:
    """Return the seconds that a rank spent in each phase, in all rounds."""
    found: dict[str, float] = {}
    for phase in PHASES:
        seconds = sum(span.end - span.begin for span in rank.spans if span.phase == phase)
        if seconds > 0:
            found[phase] = seconds
    return found
