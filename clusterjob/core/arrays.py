"""Parse --array and --sweep into the elements of a job, and split arrays into pieces."""

from __future__ import annotations

import csv
import itertools
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from clusterjob.errors import SpecError
from clusterjob.node.program import Program

MOST = 100_000  # maximum number of elements of one job
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", re.ASCII)
_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class Array:
    """The elements of a job.

    Attributes:
        indices: the index of each element, ascending.
        at_once: maximum number of running elements; None for no limit by clusterjob.
        values: for a sweep, one tuple of (name, value) pairs per element of the sweep, by index;
            else empty.
    """

    indices: tuple[int, ...]
    at_once: int | None = None
    values: tuple[tuple[tuple[str, str], ...], ...] = ()


@dataclass(frozen=True)
class Piece:
    """A part of an array that fits into one submission.

    Attributes:
        offset: number to add to a cluster's index to get the element's index.
        indices: the cluster's indices, ascending.
        at_once: maximum number of running elements of this piece; None for no limit.
    """

    offset: int
    indices: tuple[int, ...]
    at_once: int | None


def parse(array: str, sweep: Sequence[str]) -> Array | None:
    """Return the array that ``--array`` and ``--sweep`` describe; None if neither is given.

    Args:
        array: such as ``0-99%8``, ``1,3,7-9`` or ``0-20:5``; with a sweep, ``%8`` alone limits how
            many run at a time.
        sweep: such as ``lr=0.1,0.01`` or ``seed=0-9``; every combination becomes an element, and
            the last name varies fastest.

    Raises:
        SpecError: a text is not a valid array or sweep, or there are too many elements.
    """
    if not array and not sweep:
        return None
    text, percent, limit = array.partition("%")
    at_once = None
    if percent:
        if not re.fullmatch(r"[1-9]\d{0,8}", limit, re.ASCII):
            raise SpecError(
                f"--array {array!r}: {limit!r} is not a number of elements that may run at a time"
            )
        at_once = int(limit)
    if not sweep:
        return Array(indices(text, f"--array {array!r}"), at_once)
    if text:
        raise SpecError(
            "--array and --sweep both define the elements",
            "with --sweep, --array %8 limits how many run at a time",
        )
    axes = [_axis(item) for item in sweep]
    names = [name for name, _ in axes]
    if len(set(names)) != len(names):
        raise SpecError(
            f"--sweep names {next(name for name in names if names.count(name) > 1)!r} twice",
            "put its values into one list",
        )
    count = math.prod(len(choices) for _, choices in axes)
    _check_count(count)
    values = tuple(
        tuple(zip(names, combination, strict=True))
        for combination in itertools.product(*(choices for _, choices in axes))
    )
    return Array(tuple(range(count)), at_once, values=values)


def subset(array: Array, wanted: Sequence[int]) -> Array:
    """Return an array with some elements of another one, which keep their indices and values.

    Raises:
        SpecError: the array has no such element.
    """
    if unknown := sorted(set(wanted) - set(array.indices)):
        raise SpecError(f"the array has no element {unknown[0]}")
    return replace(array, indices=tuple(sorted(set(wanted))))


def indices(text: str, origin: str) -> tuple[int, ...]:
    """Return the numbers in a list of numbers and ranges, ascending and without duplicates.

    Args:
        text: such as ``0-99``, ``1,3,7-9`` or ``0-20:5``.
        origin: the option and value that the text is from, for the error.

    Raises:
        SpecError: the list is invalid, or has too many numbers.
    """
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise SpecError(
                f"{origin}: {part!r} is not an index or a range of indices",
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
        raise SpecError(f"{count} elements: one job may have at most {MOST}")


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
            'put a value with a comma in double quotes: mix="a,b",c',
        ) from None
    if text and re.search(r"(?:^|,)(?:,|$)", re.sub(r'"(?:[^"]|"")*"', "quoted", text)):
        raise SpecError(
            f"--sweep {item!r}: a value is empty",
            f'remove the comma, or write "" for an empty value: \'{name}="",a\'',
        )
    choices: list[str] = []
    for word in row:
        if dots := re.fullmatch(r"(-?\d+)\.{2,3}(-?\d+)", word, re.ASCII):
            raise SpecError(
                f"--sweep {item!r}: {word!r} is not a range of indices",
                f"did you mean {name}={dots[1]}-{dots[2]}?",
            )
        match = _RANGE.fullmatch(word)
        choices += map(str, indices(word, f"--sweep {item!r}")) if match and match[2] else [word]
        _check_count(len(choices))
    if not choices:
        raise SpecError(f"--sweep {item!r} gives no value")
    return name, choices


def program_of(program: Program, values: Sequence[tuple[str, str]]) -> Program:
    """Return the program of one element of a sweep.

    Each value replaces ``{name}`` in the arguments, or is added as an argument ``--name=value``. An
    argument ``{name...}`` becomes the shell words of the value: several arguments, or none.

    Raises:
        SpecError: a value for ``{name...}`` has an unclosed quote.
    """
    if not values:
        return program
    given = dict(values)
    several = {"{" + name + "...}": name for name in given}
    mark = re.compile(
        "|".join(re.escape("{" + name + "}") for name in given)
    )  # one pattern for all names, so that {name} in an inserted value stays unchanged
    placed = {match[1:-1] for arg in program.args for match in mark.findall(arg)}
    args: list[str] = []
    for arg in program.args:
        if arg in several:
            placed.add(several[arg])
            args += _words(given[several[arg]])
        else:
            args.append(mark.sub(lambda match: given[match[0][1:-1]], arg))
    return replace(
        program,
        args=(*args, *(f"--{name}={value}" for name, value in values if name not in placed)),
    )


def _words(value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError as error:
        raise SpecError(f"--sweep: {value!r} is no list of shell words: {error}") from error


def pieces(array: Array, largest: int) -> list[Piece]:
    """Split an array so that all indices of each piece are below `largest`.

    Slurm's MaxArraySize limits the index, not the number of elements. So each piece has an offset
    and small indices. The limit of running elements is divided among the pieces.

    Args:
        array: the elements.
        largest: the cluster's limit: its indices must be below it.
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
    """Return ascending indices in the syntax of a cluster: ``0-3,7``."""
    from clusterjob.node.system.ranges import ranges

    return ",".join(ranges(list(indices)))
