"""Expand lists of hosts with ranges, such as ``gpu[01-03,7]-ib,login``."""

from __future__ import annotations

from clusterjob.errors import PlacementError

_MAX_NAMES = 65536  # the limit of Slurm's own tools
_MAX_NAME = 255  # maximum characters of a host name
_MAX_LIST = 1 << 22  # maximum characters of a host list
_TOO_MANY = f"it names more than {_MAX_NAMES} hosts"
_IN_A_NAME = "._-:%@+"


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
    if len(text) > _MAX_LIST:
        raise PlacementError(f"the host list is {len(text)} characters long")
    names: list[str] = []
    try:
        for item in split_hostlist(text):
            names += _expand_name(item, _MAX_NAMES - len(names))
    except ValueError as error:
        raise PlacementError(f"{text[:80]!r} is not a list of hosts: {error}") from error
    return names


def split_hostlist(text: str) -> list[str]:
    """Split a host list at commas and white space outside brackets.

    Raises:
        ValueError: a bracket is not closed, or is not opened.
    """
    items, start, depth = [], 0, 0
    for index, letter in enumerate(text):
        if letter in "[]":
            depth += 1 if letter == "[" else -1
            if depth not in (0, 1):
                raise ValueError("its brackets do not match")
        elif depth == 0 and (letter == "," or letter.isspace()):
            items.append(text[start:index])
            start = index + 1
    if depth:
        raise ValueError("a bracket is not closed")
    return [item for item in [*items, text[start:]] if item]


def _expand_name(item: str, most: int) -> list[str]:
    first, *brackets = item.split("[")
    names = [_checked(first)]
    for bracket in brackets:
        numbers, _, rest = bracket.partition("]")
        _checked(rest)
        endings = [number + rest for number in expand_numbers(numbers, most // len(names))]
        if len(names[0]) + len(endings[0]) > _MAX_NAME:
            raise ValueError(f"a name is longer than {_MAX_NAME} characters")
        names = [name + ending for name in names for ending in endings]
    if len(names[0]) > _MAX_NAME:
        raise ValueError(f"a name is longer than {_MAX_NAME} characters")
    if len(names) > most:
        raise ValueError(_TOO_MANY)
    return names


def expand_numbers(numbers: str, most: int = _MAX_NAMES) -> list[str]:
    """Return the numbers of one bracket, such as ``01-03,7``.

    The size of each range is checked before the range is expanded.

    Raises:
        ValueError: a part is not a range of numbers, or there are more than `most` numbers.
    """
    found: list[str] = []
    for part in numbers.split(","):
        low, dash, high = part.partition("-")
        ends = (low, high) if dash else (low, low)
        if not all(end.isascii() and end.isdigit() and len(end) < 19 for end in ends) or int(
            ends[1]
        ) < int(ends[0]):
            raise ValueError(f"{part[:40]!r} is not a range of numbers")
        if len(found) + int(ends[1]) - int(ends[0]) + 1 > most:
            raise ValueError(_TOO_MANY)
        found += [f"{number:0{len(low)}d}" for number in range(int(ends[0]), int(ends[1]) + 1)]
    return found


def _checked(part: str) -> str:
    """Return a part of a name if it has no characters special to a shell (CVE-2024-27763)."""
    for letter in part:
        if not (letter.isalnum() or letter in _IN_A_NAME):
            raise ValueError(f"a host name cannot contain {letter!r}")
    return part
