"""Arrays and sweeps as people write them: which elements a job has, what each of them runs, and how
they are cut into pieces.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from clusterjob.errors import SpecError
from clusterjob.node.program import Program

MOST = 100_000  # elements of one job
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", re.ASCII)
_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class Array:
    """The elements of a job.

    Attributes:
        indices: the index of each element, ascending.
        at_once: how many may run at a time; None for as many as the cluster lets.
        values: for a sweep, the names and values of each element, in the order of `indices`; else
            empty.
    """

    indices: tuple[int, ...]
    at_once: int | None = None
    values: tuple[tuple[tuple[str, str], ...], ...] = ()


@dataclass(frozen=True)
class Piece:
    """A part of an array that one submission can carry.

    Attributes:
        offset: what is added to a cluster's own index to get the element's.
        indices: the cluster's own indices, ascending.
        at_once: how many of this piece may run at a time.
    """

    offset: int
    indices: tuple[int, ...]
    at_once: int | None


def parse(array: str, sweep: Sequence[str]) -> Array | None:
    """Return the array that ``--array`` and ``--sweep`` describe; None where neither is given.

    Args:
        array: such as ``0-99%8``, ``1,3,7-9`` or ``0-20:5``; for a sweep ``%8`` alone limits how
            many run at a time.
        sweep: such as ``lr=0.1,0.01`` or ``seed=0-9``; every combination becomes an element, the
            last name varying fastest.

    Raises:
        SpecError: a text is no array and no sweep, or there are too many elements.
    """
    if not array and not sweep:
        return None
    text, percent, limit = array.partition("%")
    at_once = None
    if percent:
        if not re.fullmatch(r"[1-9]\d{0,8}", limit, re.ASCII):
            raise SpecError(
                f"--array {array!r}: {limit!r} is no number of elements that may run at a time"
            )
        at_once = int(limit)
    if not sweep:
        return Array(indices(text, f"--array {array!r}"), at_once)
    if text:
        raise SpecError(
            "--array and --sweep each say which elements there are",
            "with --sweep, --array %8 limits how many run at a time",
        )
    axes = [_axis(item) for item in sweep]
    names = [name for name, _ in axes]
    if len(set(names)) != len(names):
        raise SpecError(
            f"--sweep names {next(name for name in names if names.count(name) > 1)!r} twice",
            "put its values into one list",
        )
    count = 1
    for _, choices in axes:
        count *= len(choices)
    _check_count(count)
    values = tuple(
        tuple(zip(names, combination, strict=True))
        for combination in itertools.product(*(choices for _, choices in axes))
    )
    return Array(tuple(range(count)), at_once, values=values)


def indices(text: str, origin: str) -> tuple[int, ...]:
    """Return the numbers that a list of numbers and ranges names, ascending, each once.

    Args:
        text: such as ``0-99``, ``1,3,7-9`` or ``0-20:5``.
        origin: where it was written, for the error.

    Raises:
        SpecError: it is no such list, or names too many.
    """
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise SpecError(
                f"{origin}: {part!r} is no index and no range of indices",
                "write it as 0-99, 1,3,7-9 or 0-20:5",
            )
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if last < first or step < 1:
            raise SpecError(f"{origin}: {part!r} is an empty range")
        _check_count((last - first) // step + 1)
        found.update(range(first, last + 1, step))
        _check_count(len(found))
    return tuple(sorted(found))


def _check_count(count: int) -> None:
    if count > MOST:
        raise SpecError(f"{count} elements are more than the {MOST} that one job may have")


def _axis(item: str) -> tuple[str, list[str]]:
    name, equals, text = item.partition("=")
    if not equals or not _NAME.fullmatch(name):
        raise SpecError(
            f"--sweep {item!r} is not NAME=VALUES", "write it as lr=0.1,0.01 or seed=0-9"
        )
    try:
        (row,) = csv.reader([text], strict=True)
    except (csv.Error, ValueError):
        raise SpecError(
            f"--sweep {item!r}: the values are not a list",
            'values hold a comma in double quotes: mix="a,b",c',
        ) from None
    if text and re.search(r"(?:^|,)(?:,|$)", re.sub(r'"(?:[^"]|"")*"', "quoted", text)):
        raise SpecError(
            f"--sweep {item!r}: a value is empty",
            f'take the comma away, or write "" for an empty value: \'{name}="",a\'',
        )
    choices: list[str] = []
    for word in row:
        if dots := re.fullmatch(r"(-?\d+)\.{2,3}(-?\d+)", word, re.ASCII):
            raise SpecError(
                f"--sweep {item!r}: {word!r} is no range of indices",
                f"did you mean {name}={dots[1]}-{dots[2]}?",
            )
        match = _RANGE.fullmatch(word)
        choices += map(str, indices(word, f"--sweep {item!r}")) if match and match[2] else [word]
        _check_count(len(choices))
    if not choices:
        raise SpecError(f"--sweep {item!r} gives no value")
    return name, choices


def program_of(program: Program, values: Sequence[tuple[str, str]]) -> Program:
    """Return what one element of a sweep runs: each value in the place of ``{name}``, else as an
    argument ``--name=value``.
    """
    if not values:
        return program
    given = dict(values)
    mark = re.compile(
        "|".join(re.escape("{" + name + "}") for name in given)
    )  # all at once: a value may look like a mark
    placed = {match[1:-1] for arg in program.args for match in mark.findall(arg)}
    args = [mark.sub(lambda match: given[match[0][1:-1]], arg) for arg in program.args]
    return replace(
        program,
        args=(*args, *(f"--{name}={value}" for name, value in values if name not in placed)),
    )


def pieces(array: Array, largest: int) -> list[Piece]:
    """Return an array cut so that no piece has an index of its own of `largest` or more.

    Slurm's MaxArraySize caps the index and not the count, so each piece counts from an offset; the
    number that may run at a time is shared out.

    Args:
        array: the elements.
        largest: the cluster's limit: its own indices stay below it.
    """
    groups = [
        (base * largest, [*group])
        for base, group in itertools.groupby(array.indices, lambda index: index // largest)
    ]
    if array.at_once is None:
        shares: list[int | None] = [None] * len(groups)
    else:
        share, rest = divmod(array.at_once, len(groups))
        shares = [max(1, share + (number < rest)) for number in range(len(groups))]
    return [
        Piece(offset, tuple(index - offset for index in group), at_once=limit)
        for (offset, group), limit in zip(groups, shares, strict=True)
    ]


def ranges_text(indices: Sequence[int]) -> str:
    """Return ascending indices as a cluster takes them: ``0-3,7``."""
    from clusterjob.node.logs.folding import ranges

    return ",".join(ranges(list(indices)))
