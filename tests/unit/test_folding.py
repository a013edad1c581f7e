"""Folding of equal lines that several ranks write within two seconds, in one poll."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from clusterjob.node.logs.log_files import Labelled, LogLine, fold


def log_line(seconds: float, rank: int, text: str) -> LogLine:
    return LogLine(0, rank, stream="out", text=text, seconds=seconds)


def folded(lines: list[LogLine]) -> list[tuple[str, str]]:
    return [(label, line.text) for label, line in fold_all(lines)]


def fold_all(lines: list[LogLine]) -> list[Labelled]:
    return [*itertools.chain.from_iterable(fold([lines]))]


def test_equal_lines_of_ranks_with_staggered_start_are_folded() -> None:
    """Like nanoGPT: all ranks write 18 equal lines; rank 0 writes one line before them."""
    common_lines = [f"Overriding: key{number} = 1" for number in range(18)]
    lines = [
        log_line(0.1 * rank, rank, text)
        for rank in (1, 2, 3, 0)
        for text in (["tokens per iteration: 1"] if rank == 0 else []) + common_lines
    ]
    assert folded(lines) == [
        ("0", "tokens per iteration: 1"),
        *(("0-3", text) for text in common_lines),
    ]


def test_equal_lines_after_different_lines_are_folded() -> None:
    lines = [
        log_line(0.2 * rank, rank, text)
        for rank in range(4)
        for text in (f"rank {rank} loaded", "ready")
    ]
    assert folded(lines) == [
        *((str(rank), f"rank {rank} loaded") for rank in range(4)),
        ("0-3", "ready"),
    ]


def test_equal_lines_a_minute_apart_are_not_folded() -> None:
    assert folded([log_line(0, 0, "epoch"), log_line(60, 1, "epoch")]) == [
        ("0", "epoch"),
        ("1", "epoch"),
    ]


def test_rank_without_first_separator_is_still_folded() -> None:
    """Rank 1 lacks the first separator; a match with a later one would prevent folding of steps."""
    lines = [log_line(0, 0, text) for text in ("---", "step 1", "---", "step 2")] + [
        log_line(0.1, 1, text) for text in ("step 1", "---", "step 2")
    ]
    assert folded(lines) == [("0", "---"), ("0-1", "step 1"), ("0-1", "---"), ("0-1", "step 2")]


def test_equal_lines_of_ranks_and_nodes_are_folded_in_each_stream() -> None:
    ranks = [LogLine(rank % 2, rank, stream="out", text="x") for rank in (5, 0, 1, 10, 2)]
    other = [LogLine(0, 3, stream="err", text="x"), LogLine(0, 3, stream="out", text="other")]
    assert fold_all([*ranks, *other]) == [
        ("0-2,5,10", ranks[0]),
        ("3", other[0]),
        ("3", other[1]),
    ]


def test_many_or_long_lines_are_folded_in_parts() -> None:
    count = 12_000
    parts = [*fold([log_line(0, number % 2, str(number))] for number in range(count))]
    assert max(map(len, parts)) <= 5001
    assert sum(map(len, parts)) == count
    long = "x" * (1 << 20)
    assert len([*fold([log_line(1, 0, f"{number}{long}")] for number in range(10))]) > 1


def writers(label: str) -> list[int]:
    """Return the ranks that a label names."""
    found: list[int] = []
    for part in label.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


some_lines = st.lists(
    st.builds(
        LogLine,
        node_rank=st.integers(0, 1),
        rank=st.integers(0, 4),
        stream=st.sampled_from(["out", "err"]),
        text=st.sampled_from("abcdefg"),
        seconds=st.floats(0, 9),
    ),
    max_size=60,
)


@given(some_lines, st.booleans())
def test_folding_keeps_all_lines_of_each_rank_in_order(lines: list[LogLine], in_time: bool) -> None:
    if in_time:
        lines.sort(key=lambda line: line.seconds)
    written: dict[tuple[int, str], list[str]] = {}
    for line in lines:
        written.setdefault((line.rank, line.stream), []).append(line.text)
    shown: dict[tuple[int, str], list[str]] = {}
    for label, line in fold_all(lines):
        for one in writers(label):
            shown.setdefault((one, line.stream), []).append(line.text)
    assert shown == written


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=10),
    st.integers(1, 20),
)
def test_equal_output_of_all_ranks_is_shown_once(output: list[str], ranks: int) -> None:
    lines = [LogLine(0, rank, stream="out", text=text) for rank in range(ranks) for text in output]
    label = "0" if ranks == 1 else f"0-{ranks - 1}"
    assert folded(lines) == [(label, text) for text in output]
