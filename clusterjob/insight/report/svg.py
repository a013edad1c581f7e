"""Parts that all pictures of a report share: text, the time axis, numbers with units."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import NamedTuple

from clusterjob.core.units import show_size
from clusterjob.node.system.sanitize import sanitize

_STEPS = (
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400,
    172800, 604800,
)  # fmt: skip


def escape(text: object) -> str:
    """Return text for the content or an attribute of an element."""
    return html.escape(sanitize(str(text)))


def number(value: float) -> str:
    """Return a coordinate with one decimal, as short as possible."""
    return f"{value:.1f}".removesuffix(".0")


def clock(seconds: float) -> str:
    """Show a time on the job's axis: 0:05, 12:30, 1:02:03 or 1d 02:03:04."""
    total = int(seconds)
    days, hours, minutes = total // 86400, total // 3600 % 24, total // 60 % 60
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{total % 60:02}"
    return f"{hours}:{minutes:02}:{total % 60:02}" if hours else f"{minutes}:{total % 60:02}"


class Frame(NamedTuple):
    """The size of a picture in its own units: its width and the margins for labels."""

    width: int
    left: int
    right: int

    @property
    def plot(self) -> int:
        """The width between the margins."""
        return self.width - self.left - self.right

    def x_of(self, time: float, end: float) -> float:
        """Return the coordinate of a time on the axis from 0 to `end`."""
        return self.left + self.plot * min(1.0, max(0.0, time / end))

    def axis(self, end: float, top: float, bottom: float) -> str:
        """Return the vertical lines of the time axis with their labels below."""
        parts = []
        for time in self._ticks(end):
            x = self.x_of(time, end)
            anchor = "end" if x > self.width - self.right - 20 else "middle"
            parts.append(
                f'<path class="grid" d="M{number(x)} {number(top)}V{number(bottom)}"/>'
                f'<text class="tick" x="{number(x)}" y="{number(bottom + 15)}"'
                f' text-anchor="{anchor}">{clock(time)}</text>'
            )
        return "".join(parts)

    def _ticks(self, end: float) -> Iterator[float]:
        """Yield the times of the labels on the axis: about one per 100 units."""
        most = self.plot / 100
        step = next((float(step) for step in _STEPS if end / step <= most), end / most)
        for index in range(int(end / step) + 1):
            yield index * step

    def open(self, height: float, title: str, description: str, name: str) -> str:
        """Return the start tag of a picture with its name for screen readers."""
        return (
            f'<svg viewBox="0 0 {self.width} {number(height)}" role="img" '
            f'aria-labelledby="{name}-t {name}-d"><title id="{name}-t">{escape(title)}</title>'
            f'<desc id="{name}-d">{escape(description)}</desc>'
        )


WIDE, HALF = Frame(1000, 112, 12), Frame(540, 78, 8)


def quantity(value: float | None, unit: str) -> str:
    """Show a value: percent, bytes or bytes per second."""
    if value is None:
        return "–"
    if unit == "%":
        return f"{value:.0f} %"
    if value < 1:
        return "0"
    return show_size(int(value)) + ("/s" if unit == "B/s" else "")


def nice_top(value: float, unit: str) -> float:
    """Return a round number that is at least this value, for the end of a scale."""
    base = 1.0
    while base * 10 <= value:
        base *= 10
    top = next(step for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * base >= value) * base
    return max(top, 100.0 if unit == "%" else 1.0)
