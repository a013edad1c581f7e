"""Parsing and splitting of arrays and sweeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterjob.core import arrays
from clusterjob.core.arrays import Array
from clusterjob.errors import SpecError
from clusterjob.node.program import Program

INDICES = st.sets(st.integers(0, 5000), min_size=1, max_size=60).map(sorted)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", None),
        ("0-3", Array((0, 1, 2, 3), None)),
        ("7", Array((7,), None)),
        ("1,3,7-9", Array((1, 3, 7, 8, 9), None)),
        ("0-20:5", Array((0, 5, 10, 15, 20), None)),
        ("3,1,2,1", Array((1, 2, 3), None)),
        ("0-99%8", Array(tuple(range(100)), 8)),
        ("0-0", Array((0,), None)),
        (" 1 , 2 ", Array((1, 2), None)),
        ("0-6:4", Array((0, 4), None)),
        ("1,2%1", Array((1, 2), 1)),
    ],
)
def test_array_text_gives_sorted_indices_and_limit(text: str, wanted: Array | None) -> None:
    assert arrays.parse(text, ()) == wanted


@pytest.mark.parametrize(
    ("text", "sweep", "error"),
    [
        ("x", [], "'x' is not an index"),
        ("-1", [], "'-1' is not an index"),
        ("1-", [], "'1-' is not an index"),
        ("3-1", [], "'3-1' is an empty range"),
        ("1-5:0", [], "empty range"),
        ("1,,2", [], "'' is not an index"),
        ("0-3%", [], "'' is not a number"),
        ("0-3%0", [], "'0' is not a number"),
        ("0-3%x", [], "'x' is not a number"),
        ("0-100000", [], "100001 elements: one job may have at most 100000"),
        ("0-999999999", [], "1000000000 elements"),
        ("0-60000,70000-130000", [], "elements: one job may have at most"),
        ("٣", [], "is not an index"),
        ("%8", [], "'' is not an index"),
        ("1;2", [], "'1;2' is not an index"),
        ("0-3", ["a=1"], "both define the elements"),
        ("", ["lr"], "is not NAME=VALUES"),
        ("", ["=1"], "is not NAME=VALUES"),
        ("", ["1a=2"], "is not NAME=VALUES"),
        ("", ["a b=2"], "is not NAME=VALUES"),
        ("", ['a="1'], "are not a list"),
        ("", ["a=1", "a=2"], "names 'a' twice"),
        ("", ["a=0-999", "b=0-999"], "1000000 elements"),
        ("", ["a=9-1"], "empty range"),
        ("", ["a="], "gives no value"),
        ("", ["lr=0.1,"], "a value is empty"),
        ("", ["lr=,0.1"], "a value is empty"),
        ("", ["lr=1,,2"], "a value is empty"),
        ("", ["seed=0..9"], "'0..9' is not a range"),
        ("", ["seed=1,3...5"], "'3...5' is not a range"),
    ],
)
def test_wrong_array_or_sweep_is_refused(text: str, sweep: list[str], error: str) -> None:
    with pytest.raises(SpecError) as caught:
        arrays.parse(text, sweep)
    assert error in caught.value.message
    assert "\n" not in caught.value.message


def test_sweep_is_every_combination_with_last_name_fastest() -> None:
    array = arrays.parse("%3", ["lr=0.1,0.01", "seed=0-2"])
    assert (array.indices, array.at_once) == (tuple(range(6)), 3)
    assert [dict(values) for values in array.values] == [
        {"lr": lr, "seed": seed} for lr in ("0.1", "0.01") for seed in ("0", "1", "2")
    ]


@pytest.mark.parametrize(
    ("item", "values"),
    [
        ("a=1", ["1"]),
        ('a=x,y z,""', ["x", "y z", ""]),
        ('a="p,,q",r', ["p,,q", "r"]),
        ('a="1,2",3', ["1,2", "3"]),
        ('a="say ""hi"""', ['say "hi"']),
        ("a=b=c", ["b=c"]),
        ("a=0-6:3,x", ["0", "3", "6", "x"]),
        ("a=-1,-2", ["-1", "-2"]),
        ("a=1e-3", ["1e-3"]),
        ("a.b-c=1", ["1"]),
        ('a="x\ny",z', ["x\ny", "z"]),
        ("a=$(id),☃", ["$(id)", "☃"]),
        ("a=2024-01-01", ["2024-01-01"]),
    ],
)
def test_sweep_values_are_split_like_csv_and_ranges(item: str, values: list[str]) -> None:
    array = arrays.parse("", [item])
    assert [value for ((_, value),) in array.values] == values


@pytest.mark.parametrize(
    ("args", "values", "expected"),
    [
        (
            ("--lr", "{lr}", "{name}{lr}", "{other}"),
            (("lr", "0.1"), ("seed", "7")),
            ("--lr", "0.1", "{name}0.1", "{other}", "--seed=7"),
        ),
        ((), (), ()),
        (("{a}", "{b}"), (("a", "{b}"), ("b", "1")), ("{b}", "1")),  # it is not scanned again
        (("{a}",), (("a", "{b}"), ("b", "1")), ("{b}", "--b=1")),
    ],
)
def test_sweep_value_replaces_placeholder_or_is_appended(
    args: tuple[str, ...], values: tuple[tuple[str, str], ...], expected: tuple[str, ...]
) -> None:
    program = Program("script", "train.py", args=args)
    assert arrays.program_of(program, values).args == expected


@given(INDICES, st.integers(1, 300), st.none() | st.integers(1, 50))
def test_pieces_cover_array_and_respect_limits(
    indices: list[int], largest: int, at_once: int | None
) -> None:
    pieces = arrays.pieces(Array(tuple(indices), at_once), largest)
    assert [piece.offset + index for piece in pieces for index in piece.indices] == indices
    assert all(0 <= index < largest for piece in pieces for index in piece.indices)
    assert [piece.offset for piece in pieces] == sorted({piece.offset for piece in pieces})
    shares = [piece.at_once for piece in pieces if piece.at_once is not None]
    if at_once is None:
        assert shares == []
    else:
        assert len(shares) == len(pieces)
        assert sum(shares) == max(at_once, len(pieces))  # each piece gets at least one
        assert 1 <= min(shares) <= max(shares) <= min(shares) + 1


@given(INDICES)
def test_ranges_text_expands_to_same_indices(indices: list[int]) -> None:
    assert arrays.indices(arrays.ranges_text(indices), "here") == tuple(indices)
