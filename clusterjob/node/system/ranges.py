"""Numbers as ranges: expand those of host lists, such as ``gpu[01-03,7]``; show sorted ones."""

from __future__ import annotations

import re
from collections.abc import Iterable

from clusterjob.errors import PlacementError

_MAX_NAMES = 65536  # the limit of Slurm's own tools
_MAX_NAME = 255  # maximum characters of a host name
_TOO_MANY = f"it names more than {_MAX_NAMES} hosts"
_ITEM = re.compile(r"(?:[^\s,\[\]]+|\[[^\[\]]*\])+")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_PART = re.compile(r"\[[^\[\]]*\]|[^\[\]]+")
_NOT_IN_A_NAME = re.compile(r"[^\w.:%@+-]")  # characters special to a shell (CVE-2024-27763)


def expand_hostlist(text: str) -> list[str]:
    """Return the host names of a Slurm host list, in the written order.

    An example is ``gpu[01-03,7]-ib,login``. Ranges count up and keep the leading zeros of their
    first number. In a name with several brackets, the last bracket changes fastest, as in Slurm
    22.05 with up to two brackets. For three brackets Slurm has another order, and it refuses some
    texts after a bracket.

    Args:
        text: the list; commas or white space separate the names.

    Raises:
        PlacementError: the text is not a host list, or it names more than 65,536 hosts.
    """
    names: list[str] = []
    try:
        for item in split_hostlist(text):
            names += _expand_name(item)
            if len(names) > _MAX_NAMES:
                raise ValueError(_TOO_MANY)
    except ValueError as error:
        raise PlacementError(f"{text[:80]!r} is not a list of hosts: {error}") from error
    return names


def split_hostlist(text: str) -> list[str]:
    """Split a host list at commas and white space outside brackets.

    Raises:
        ValueError: a bracket is not closed, or is not opened.
    """
    if _ITEM.sub("", text).replace(",", "").strip():
        raise ValueError("its brackets do not match")
    return _ITEM.findall(text)


def _expand_name(item: str) -> list[str]:
    names = [""]
    for part in _PART.findall(item):
        endings = [part]
        if part.startswith("["):
            endings = expand_numbers(part[1:-1], _MAX_NAMES // len(names))
        elif found := _NOT_IN_A_NAME.search(part):
            raise ValueError(f"a host name cannot contain {found[0]!r}")
        names = [name + ending for name in names for ending in endings]
        if len(names[0]) > _MAX_NAME:
            raise ValueError(f"a name is longer than {_MAX_NAME} characters")
    return names


def expand_numbers(numbers: str, most: int = _MAX_NAMES) -> list[str]:
    """Return the numbers of one bracket, such as ``01-03,7``.

    The size of each range is checked before the range is expanded.

    Raises:
        ValueError: a part is not a range of numbers, or there are more than `most` numbers.
    """
    found: list[str] = []
    for part in numbers.split(","):
        match = _RANGE.fullmatch(part)
        span = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        if match is None or not span:
            raise ValueError(f"{part[:40]!r} is not a range of numbers")
        if len(found) + len(span) > most:
            raise ValueError(_TOO_MANY)
        found += [f"{number:0{len(match[1])}d}" for number in span]
    return found


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
