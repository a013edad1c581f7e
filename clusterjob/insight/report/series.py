"""A metric over the job's time, in a fixed number of columns: means and peaks."""

from __future__ import annotations

import itertools
from array import array

COLUMNS = 360  # of each series, whatever the length of the job


class Series:
    """The values of one metric in equal columns of the job's time.

    Each column keeps the sum, the number and the peak of its values, so a long job needs no more
    memory than a short one.
    """

    __slots__ = ("_counts", "_peaks", "_sums")

    def __init__(self) -> None:
        self._sums = array("d", bytes(8 * COLUMNS))
        self._counts = array("I", bytes(4 * COLUMNS))
        self._peaks = array("f", bytes(4 * COLUMNS))

    def add(self, column: int, total: float, count: int, peak: float) -> None:
        """Add values, which are not negative, to a column."""
        self._sums[column] += total
        self._counts[column] += count
        if peak > self._peaks[column]:  # noqa: PLR1730 - this line runs a million times
            self._peaks[column] = peak

    @property
    def means(self) -> list[float | None]:
        """The mean of each column; None without values."""
        return [
            total / count if count else None
            for total, count in zip(self._sums, self._counts, strict=True)
        ]

    @property
    def peaks(self) -> list[float | None]:
        """The highest value of each column; None without values."""
        return [
            peak if count else None for peak, count in zip(self._peaks, self._counts, strict=True)
        ]

    @property
    def mean(self) -> float:
        """The mean of the columns with values."""
        known = [value for value in self.means if value is not None]
        return sum(known) / len(known) if known else 0.0

    @property
    def peak(self) -> float:
        """The highest value."""
        return max(self._peaks)

    def coarse(self, step: int) -> list[float | None]:
        """Return the means of each `step` neighbouring columns."""
        means = iter(self.means)
        found: list[float | None] = []
        while part := list(itertools.islice(means, step)):
            known = [value for value in part if value is not None]
            found.append(sum(known) / len(known) if known else None)
        return found
