"""Show sorted numbers, such as ranks, as ranges."""

from __future__ import annotations

from collections.abc import Iterable


def ranges(numbers: Iterable[int]) -> list[str]:
    """Return sorted numbers as ranges: [0, 1, 2, 5] becomes ["0-2", "5"]."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found]


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as text, such as ``rank 3`` or ``ranks 0-2, 5``."""
    named = ", ".join(ranges(sorted(ranks)))
    return f"rank{'' if named.isdecimal() else 's'} {named}"
