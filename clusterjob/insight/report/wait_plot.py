"""Draw a bar for each rank: the share of its steps for which it waits in collectives."""

from __future__ import annotations

from typing import NamedTuple

from clusterjob.insight.report import svg
from clusterjob.insight.report.data import ReportData
from clusterjob.node.system.ranges import ranges

FRAME = svg.WIDE
_TOP, _BOTTOM = 8, 130
_MAX_BARS = 200  # with more ranks, those that wait the least are shown
_LABELS = 20  # ranks with a number below their bar


class WaitPlot(NamedTuple):
    """The picture, and the number of ranks without a bar."""

    picture: str
    left_out: int


def draw(data: ReportData) -> WaitPlot | None:
    """Return the picture; None if no rank has measured its waits."""
    means = {
        number: series.mean
        for found in data.series.values()
        for (key, number), series in found.items()
        if key == "rank waits"
    }
    if not means:
        return None
    ranks = sorted(sorted(means, key=lambda rank: means[rank])[:_MAX_BARS])
    late = {each.rank for each in data.stragglers}
    width = min(40.0, FRAME.plot / len(ranks))
    every = -(-len(ranks) // _LABELS)
    parts = []
    for place, rank in enumerate(ranks):
        x, height = FRAME.left + place * width, (_BOTTOM - _TOP) * min(1.0, means[rank] / 100)
        parts.append(
            f'<rect class="bar{" late" if rank in late else ""}" x="{svg.number(x + 0.1 * width)}"'
            f' width="{svg.number(0.8 * width)}" y="{svg.number(_BOTTOM - height)}"'
            f' height="{svg.number(max(height, 1.0))}"><title>rank {rank}:'
            f" {svg.quantity(means[rank], '%')}</title></rect>"
        )
        if rank in late or place % every == 0:
            parts.append(
                f'<text class="{"lab bad" if rank in late else "tick"}" text-anchor="middle"'
                f' x="{svg.number(x + width / 2)}" y="{_BOTTOM + 15}">{rank}</text>'
            )
    shown = ", ".join(ranges(sorted(late & {*ranks})))
    about = f"The others wait for rank {shown}." if shown else "No rank is clearly late."
    head = FRAME.open(_BOTTOM + 22, f"Waits of {len(ranks)} ranks", about, "waits")
    return WaitPlot("".join([head, _scale(), *parts, "</svg>"]), len(means) - len(ranks))


def _scale() -> str:
    """Return the horizontal lines with their labels."""
    parts = []
    for percent in (0, 50, 100):
        y = _BOTTOM - (_BOTTOM - _TOP) * percent / 100
        parts.append(
            f'<path class="grid" d="M{FRAME.left} {svg.number(y)}H{FRAME.width - FRAME.right}"/>'
            f'<text class="tick" x="{FRAME.left - 6}" y="{svg.number(y + 4)}" text-anchor="end">'
            f"{percent} %</text>"
        )
    return "".join(parts)
