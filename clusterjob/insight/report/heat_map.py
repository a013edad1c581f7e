"""Draw rank-by-time heat maps as small PNG images inside SVG."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from clusterjob.insight.report import svg
from clusterjob.insight.report.data import Rank, ReportData
from clusterjob.insight.report.measured import NODE
from clusterjob.insight.report.series import COLUMNS, Series
from clusterjob.insight.report.timeline import places, row_height, row_labels, shown_ranks

FRAME = svg.WIDE
_LEVELS = 32  # colours; fewer make the image smaller
_TOP = 6
# Points of viridis, which is readable without colour vision and in grey.
_VIRIDIS = (
    (68, 1, 84), (72, 40, 120), (62, 74, 137), (49, 104, 142), (38, 130, 142), (31, 158, 137),
    (53, 183, 121), (109, 205, 89), (180, 222, 44), (253, 231, 37),
)  # fmt: skip


class HeatMap(NamedTuple):
    """A picture, the ends of its colour scale, and the name of its values."""

    name: str
    title: str
    picture: str
    low: str
    high: str
    note: str


_METRICS = (
    ("rank cpu", "CPU", "%"),
    ("gpu use", "GPU use", "%"),
    ("rank memory", "Memory", "B"),
    ("gpu memory", "GPU memory", "B"),
    ("rank disk", "Disk", "B/s"),
    ("rank waits", "Waits", "%"),
)


def draw(data: ReportData) -> list[HeatMap]:
    """Return a heat map for each metric of which the ranks have samples."""
    if data.end <= 0:
        return []
    ranks = shown_ranks(data)
    maps = []
    for key, title, unit in _METRICS:
        found = _series(data, ranks, key)
        values = {rank: series.means for rank, series in found.items()}
        known = [value for row in values.values() for value in row if value is not None]
        if not known:
            continue
        high = svg.nice_top(max(known), unit)
        if key != "rank disk" or max(known) > 1e6:
            maps.append(_picture(data, ranks, values, key, title, unit, high))
    return maps


def _series(data: ReportData, ranks: Sequence[Rank], key: str) -> dict[int, Series]:
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


def _picture(
    data: ReportData,
    ranks: Sequence[Rank],
    values: dict[int, list[float | None]],
    key: str,
    title: str,
    unit: str,
    high: float,
) -> HeatMap:
    height = max(row_height(len(ranks)), 2.0)
    tops, total = places(ranks, height)
    hosts = {node.rank: node.host for node in data.nodes}
    order = sorted(ranks, key=lambda rank: (rank.node, rank.rank))
    scale = max(1, int(height)) if total != height * len(ranks) else 1
    rows: list[bytes] = []
    if scale == 1:
        rows = [_row(values.get(rank.rank), high) for rank in order]
    else:  # one line of pixels per unit, so that the gaps between nodes lie between the rows
        rows = [bytes(COLUMNS)] * int(total)
        for rank in order:
            row = _row(values.get(rank.rank), high)
            top = int(tops[rank.rank])
            rows[top : top + scale] = [row] * scale
    image = base64.b64encode(_png(rows)).decode()
    name = "heat-" + key.replace(" ", "-")
    bottom = _TOP + total
    picture = "".join(
        [
            FRAME.open(
                bottom + 22,
                f"{title} of {len(ranks)} ranks over time",
                f"One row per rank, grouped by node; from dark (0) to light"
                f" ({svg.quantity(high, unit)}). The table of ranks has the mean and the peak.",
                name,
            ),
            FRAME.axis(data.end, _TOP, bottom),
            _image(image, total),
            row_labels(ranks, hosts, tops, height, _TOP),
            *(
                f'<rect class="outline" x="{FRAME.left - 1}" width="{FRAME.plot + 2}" '
                f'y="{svg.number(_TOP + tops[rank.rank] - 1)}" height="{svg.number(height + 2)}"/>'
                for rank in ranks
                if rank.failed
            ),
            "</svg>",
        ]
    )
    low = svg.quantity(0.0, unit)
    note = "GPU of the same position as the rank on its node" if key.startswith("gpu") else ""
    if key == "rank waits":
        note = "share of its steps for which a rank waits in collectives"
    return HeatMap(name, title, picture, low, svg.quantity(high, unit), note)


def _image(data: str, height: float) -> str:
    return (
        f'<image class="heat" x="{FRAME.left}" y="{_TOP}" width="{FRAME.plot}" '
        f'height="{svg.number(height)}" preserveAspectRatio="none" '
        f'href="data:image/png;base64,{data}"/>'
    )


def _row(values: Sequence[float | None] | None, high: float) -> bytes:
    """Return the colour numbers of one row; 0 is transparent."""
    if values is None:
        return bytes(COLUMNS)
    return bytes(
        0 if value is None else 1 + min(_LEVELS - 1, int(value / high * _LEVELS))
        for value in values
    )


def _png(rows: Sequence[bytes]) -> bytes:
    """Return an image with one byte per pixel: 0 is transparent, then `_LEVELS` colours."""
    colours = b"\0\0\0" + b"".join(map(_colour, range(_LEVELS)))
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    chunks = ((b"IHDR", header), (b"PLTE", colours), (b"tRNS", b"\0"), (b"IDAT", pixels))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in (*chunks, (b"IEND", b""))
    )


def _colour(level: int) -> bytes:
    place = level / (_LEVELS - 1) * (len(_VIRIDIS) - 1)
    index = min(len(_VIRIDIS) - 2, int(place))
    pairs = zip(_VIRIDIS[index], _VIRIDIS[index + 1], strict=True)
    return bytes(round(a + (b - a) * (place - index)) for a, b in pairs)


def rank_values(data: ReportData) -> tuple[list[tuple[str, str]], dict[int, dict[str, str]]]:
    """Return the metrics of ranks as key and title, and each rank's mean and peak as text."""
    ranks = shown_ranks(data)
    found: dict[int, dict[str, str]] = {}
    titles = []
    for key, title, unit in _METRICS:
        series = _series(data, ranks, key)
        titles += [(key, title)] if series else []
        for rank, one in series.items():
            mean, peak = svg.quantity(one.mean, unit), svg.quantity(one.peak, unit)
            found.setdefault(rank, {})[key] = f"{mean}, {peak}"
    return titles, found
