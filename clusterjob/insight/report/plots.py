"""Show the metrics: pictures over time, a row for each node, and the values of each rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from clusterjob.insight.report import svg
from clusterjob.insight.report.data import Rank, ReportData
from clusterjob.insight.report.measured import NODE
from clusterjob.insight.report.series import Series
from clusterjob.insight.report.timeline import shown_ranks
from clusterjob.node.verdict import FailureKind

FRAME = svg.HALF
_SMALL_STEP = 6  # columns that are one point of a small picture
_HEIGHT, _TOP, _SMALL_HEIGHT, _SMALL_WIDTH = 130, 16, 24, 140
_MAX_LINES = 6  # nodes with a line of their own; with more, a band shows their range
_MAX_NODES = 512  # in the table


class Metric(NamedTuple):
    """A metric of a node: its key, its title and its unit."""

    key: str
    title: str
    unit: str


METRICS = (
    Metric("cpu", "CPU", "%"),
    Metric("memory", "Memory", "B"),
    Metric("gpu use", "GPU use", "%"),
    Metric("gpu memory", "GPU memory", "B"),
    Metric("network", "Network", "B/s"),
    Metric("disk", "Disk", "B/s"),
)


class Plot(NamedTuple):
    """A picture of one metric, with its legend and its highest value."""

    title: str
    picture: str
    legend: tuple[tuple[str, str], ...]  # class of the line, name
    note: str


def draw(data: ReportData) -> list[Plot]:
    """Return a picture of each metric that a node has sampled."""
    if data.end <= 0:
        return []
    failed = _failed_nodes(data)
    plots = []
    for metric in METRICS:
        found = {
            node: series[metric.key, NODE]
            for node, series in data.series.items()
            if (metric.key, NODE) in series
        }
        if found:
            plots.append(_plot(metric, found, data, failed))
    return plots


def _plot(metric: Metric, found: dict[int, Series], data: ReportData, failed: set[int]) -> Plot:
    highest = max(series.peak for series in found.values())
    top = svg.nice_top(highest, metric.unit)
    bad = [node for node in found if node in failed]
    others = [node for node in found if node not in failed]
    body, legend = [], []
    if len(found) <= _MAX_LINES:
        for place, node in enumerate(others):
            body.append(_line(found[node].means, top, f"line l{place}"))
            legend.append((f"l{place}", f"node {node}"))
            if len(found) <= 2:
                body.append(_band(found[node].means, found[node].peaks, top, f"band b{place}"))
    elif others:
        values = [found[node] for node in others]
        known = [
            [value for value in column if value is not None]
            for column in zip(*(series.means for series in values), strict=True)
        ]
        highs = [
            max((value for value in column if value is not None), default=None)
            for column in zip(*(series.peaks for series in values), strict=True)
        ]
        body.append(
            _band([min(column) if column else None for column in known], highs, top, "band b0")
        )
        body.append(_line([median(column) if column else None for column in known], top, "line l0"))
        legend += [("l0", f"median of {len(others)} nodes"), ("b0", "lowest mean to highest peak")]
    where = "with the failed rank" if failure_label(data) else "which failed"
    for node in bad[:2]:
        body.insert(0, _line(found[node].means, top, "line lbad"))  # below equal lines
        legend.append(("lbad", f"node {node}, {where}"))
    if (time := failure_time(data)) is not None:
        x = svg.number(FRAME.x_of(time, data.end))
        body.append(
            f'<path class="fail-line" d="M{x} {_TOP}V{_HEIGHT}"/>'
            f'<text class="lab bad" x="{x}" y="{_TOP - 5}" dx="4" text-anchor="end">'
            f"{svg.escape(failure_label(data))} ✕</text>"
        )
    name = "plot-" + metric.key.replace(" ", "-")
    picture = "".join(
        [
            FRAME.open(
                _HEIGHT + 22,
                f"{metric.title} over time",
                f"Highest value {svg.quantity(highest, metric.unit)}. The table of nodes has the"
                " mean and the peak of each node.",
                name,
            ),
            FRAME.axis(data.end, _TOP, _HEIGHT),
            _scale(top, metric.unit),
            *body,
            "</svg>",
        ]
    )
    note = f"peak {svg.quantity(highest, metric.unit)}"
    return Plot(metric.title, picture, tuple(legend), note)


def _failed_nodes(data: ReportData) -> set[int]:
    """Return the node of the root cause, or no node."""
    failure = data.verdict.failure if data.verdict is not None else None
    if failure is None or (failure.rank is None and failure.kind is FailureKind.HANG):
        return set()  # all ranks hang alike
    return {failure.node_rank}


def failure_time(data: ReportData) -> float | None:
    """Return when the failed rank ended; None without one."""
    for rank in data.ranks:
        if rank.failed and rank.spans:
            stops = [span for span in rank.spans if span.phase in ("stop", "ended")]
            return (stops[-1] if stops else rank.spans[-1]).begin
    return None


def failure_label(data: ReportData) -> str:
    """Return the name of the failed rank, such as ``rank 3 failed``."""
    return next((f"rank {rank.rank} failed" for rank in data.ranks if rank.failed), "")


def _scale(top: float, unit: str) -> str:
    parts = []
    for part in (0.0, 0.5, 1.0):
        y = _y(top * part, top)
        parts.append(
            f'<path class="grid" d="M{FRAME.left} {svg.number(y)}H{FRAME.width - FRAME.right}"/>'
            f'<text class="tick" x="{FRAME.left - 6}" y="{svg.number(y + 4)}" text-anchor="end">'
            f"{svg.quantity(top * part, unit)}</text>"
        )
    return "".join(parts)


def _y(value: float, top: float, height: float = _HEIGHT, above: float = _TOP) -> float:
    return height - (height - above) * min(1.0, value / top)


def _points(values: Sequence[float | None]) -> Iterable[tuple[int, list[float]]]:
    """Yield each run of known values with its first column."""
    run: list[float] = []
    for index, value in enumerate([*values, None]):
        if value is not None:
            run.append(value)
        elif run:
            yield index - len(run), run
            run = []


def _line(values: Sequence[float | None], top: float, css: str) -> str:
    step = FRAME.plot / len(values)
    parts = []
    for first, run in _points(values):
        points = [
            f"{svg.number(FRAME.left + (first + i + 0.5) * step)} {svg.number(_y(value, top))}"
            for i, value in enumerate(run)
        ]
        parts.append("M" + "L".join(points if len(run) > 1 else points * 2))
    return f'<path class="{css}" d="{"".join(parts)}"/>'


def _band(lows: Sequence[float | None], highs: Sequence[float | None], top: float, css: str) -> str:
    step = FRAME.plot / len(lows)
    parts = []
    for first, run in _points(lows):
        xs = [svg.number(FRAME.left + (first + i + 0.5) * step) for i in range(len(run))]
        ups = [_y(highs[first + i] or low, top) for i, low in enumerate(run)]
        there = [f"{x} {svg.number(y)}" for x, y in zip(xs, ups, strict=True)]
        back = [
            f"{x} {svg.number(_y(low, top))}"
            for x, low in zip(reversed(xs), reversed(run), strict=True)
        ]
        parts.append("M" + "L".join(there + back) + "Z")
    return f'<path class="{css}" d="{"".join(parts)}"/>'


# -- the table of nodes ----------------------------------------------------------------------------


class NodeRow(NamedTuple):
    """A row of the table: the node, and for each metric a small picture, mean and peak."""

    node: int
    host: str
    failed: bool
    cells: tuple[tuple[str, str, str], ...]


def table(data: ReportData) -> tuple[list[Metric], list[NodeRow]]:
    """Return the metrics, and a row for each node with samples."""
    nodes = sorted(data.series)[:_MAX_NODES]
    sampled = {key for series in data.series.values() for key, number in series if number == NODE}
    metrics = [metric for metric in METRICS if metric.key in sampled and metric.key != "disk"]
    failed = _failed_nodes(data)
    hosts = {node.rank: node.host for node in data.nodes}
    tops = {
        metric.key: max(
            [
                1e-9,
                *(
                    found[metric.key, NODE].peak
                    for found in data.series.values()
                    if (metric.key, NODE) in found
                ),
            ]
        )
        for metric in metrics
    }
    rows = []
    for node in nodes:
        cells = []
        for key, _, unit in metrics:
            series = data.series[node].get((key, NODE))
            if series is None:
                cells.append(("", "–", "–"))
                continue
            line = _small(series.coarse(_SMALL_STEP), tops[key])
            cells.append((line, svg.quantity(series.mean, unit), svg.quantity(series.peak, unit)))
        rows.append(NodeRow(node, hosts.get(node, ""), node in failed, tuple(cells)))
    return metrics, rows


def _small(values: Sequence[float | None], top: float) -> str:
    step = _SMALL_WIDTH / len(values)
    parts = []
    for first, run in _points(values):
        ys = [round(_y(value, top, _SMALL_HEIGHT - 1, 2)) for value in run]
        begin = f"M{round((first + 0.5) * step)} {ys[0]}"
        parts.append(
            begin + "".join(f"L{round((first + i + 0.5) * step)} {y}" for i, y in enumerate(ys))
        )
    return (
        f'<svg class="small" viewBox="0 0 {_SMALL_WIDTH} {_SMALL_HEIGHT}" aria-hidden="true">'
        f'<path class="line l0" d="{"".join(parts)}"/></svg>'
    )


# -- the table of ranks ----------------------------------------------------------------------------

_RANK_METRICS = (
    ("rank cpu", "CPU", "%"),
    ("gpu use", "GPU use", "%"),
    ("rank memory", "Memory", "B"),
    ("gpu memory", "GPU memory", "B"),
    ("rank disk", "Disk", "B/s"),
    ("rank waits", "Waits", "%"),
)


def rank_values(data: ReportData) -> tuple[list[tuple[str, str]], dict[int, dict[str, str]]]:
    """Return the metrics of ranks as key and title, and each rank's mean and peak as text."""
    ranks = shown_ranks(data)
    found: dict[int, dict[str, str]] = {}
    titles = []
    for key, title, unit in _RANK_METRICS:
        series = _rank_series(data, ranks, key)
        titles += [(key, title)] if series else []
        for rank, one in series.items():
            mean, peak = svg.quantity(one.mean, unit), svg.quantity(one.peak, unit)
            found.setdefault(rank, {})[key] = f"{mean}, {peak}"
    return titles, found


def _rank_series(data: ReportData, ranks: Sequence[Rank], key: str) -> dict[int, Series]:
    """Return the series of each rank that has one.

    On a node with a GPU for each rank, a rank has the GPU at its position.
    """
    by_node: dict[int, list[int]] = {}
    for rank in ranks:
        by_node.setdefault(rank.node, []).append(rank.rank)
    found = {}
    for node, own in by_node.items():
        series = data.series.get(node, {})
        numbers = dict(zip(sorted(own), sorted(own), strict=True))
        if key.startswith("gpu"):
            gpus = sorted(number for name, number in series if name == key and number != NODE)
            numbers = dict(zip(sorted(own), gpus, strict=False)) if len(gpus) >= len(own) else {}
        for rank_number, number in numbers.items():
            if (key, number) in series:
                found[rank_number] = series[key, number]
    return found
