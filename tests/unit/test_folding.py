"""Lines that ranks wrote alike are one line, whenever within a moment they came."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from clusterjob.node.logs.folding import Folded, Folder, fold
from clusterjob.node.logs.log_files import Line


def at(seconds: float, rank: int, text: str) -> Line:
    return Line(0, rank, stream="out", text=text, seconds=seconds)


def shown(lines: list[Line]) -> list[tuple[str, str]]:
    return [(line.label, line.text) for line in fold(lines)]


def test_lines_alike_of_ranks_that_started_one_after_another_are_folded() -> None:
    """nanoGPT: 18 lines that all ranks write, and one that rank 0 writes before."""
    same = [f"Overriding: key{number} = 1" for number in range(18)]
    lines = [
        at(0.1 * rank, rank, text)
        for rank in (1, 2, 3, 0)
        for text in (["tokens per iteration: 1"] if rank == 0 else []) + same
    ]
    assert shown(lines) == [("0", "tokens per iteration: 1"), *(("0-3", text) for text in same)]


def test_lines_behind_a_line_of_each_rank_s_own_are_folded() -> None:
    lines = [
        at(0.2 * rank, rank, text) for rank in range(4) for text in (f"rank {rank} loaded", "ready")
    ]
    assert shown(lines) == [
        *((str(rank), f"rank {rank} loaded") for rank in range(4)),
        ("0-3", "ready"),
    ]


def test_lines_alike_that_come_minutes_later_stay_apart() -> None:
    assert shown([at(0, 0, "epoch"), at(60, 1, "epoch")]) == [("0", "epoch"), ("1", "epoch")]


def test_ranks_that_miss_a_separator_do_not_drift_apart() -> None:
    """Rank 1 lacks the first separator: to match it with a later one would fold no step."""
    lines = [at(0, 0, text) for text in ("---", "step 1", "---", "step 2")] + [
        at(0.1, 1, text) for text in ("step 1", "---", "step 2")
    ]
    assert shown(lines) == [("0", "---"), ("0-1", "step 1"), ("0-1", "---"), ("0-1", "step 2")]


def test_what_is_added_in_pieces_is_folded_as_the_whole() -> None:
    rng = random.Random(1)
    lines = [
        at(rng.random() * 60, rank, f"step {rng.randrange(9)}")
        for rank in range(4)
        for _ in range(300)
    ]
    lines.sort(key=lambda line: line.seconds)
    folder, pieces = Folder(), list[Folded]()
    for begin in range(0, len(lines), 7):
        pieces += folder.add(lines[begin : begin + 7])
    assert [*pieces, *folder.flush()] == fold(lines)


def test_a_clock_that_was_set_back_loses_and_repeats_no_line() -> None:
    lines = [at(0, 0, "b"), at(100, 1, "a"), at(0, 1, "b"), at(1, 1, "c")]
    folder = Folder()
    found = itertools.islice(
        itertools.chain(folder.add(lines), folder.flush()), 10
    )  # of what could go on for ever
    assert sorted(found) == [
        Folded("0", "out", text="b"),
        Folded("1", "out", text="a"),
        Folded("1", "out", text="b"),
        Folded("1", "out", text="c"),
    ]


def test_a_folder_holds_back_two_seconds_and_no_more() -> None:
    folder = Folder()
    assert list(folder.add([at(10, 0, "a"), at(11, 0, "b")])) == []
    assert list(folder.add([at(12.5, 0, "c")])) == [Folded("0", "out", text="a")]
    assert list(folder.flush()) == [Folded("0", "out", text="b"), Folded("0", "out", text="c")]


some_lines = st.lists(
    st.builds(at, st.floats(0, 9), st.integers(0, 3), st.sampled_from("abcdefg")), max_size=60
)


@given(some_lines)
def test_folding_keeps_all_lines_of_each_rank_in_their_order(lines: list[Line]) -> None:
    lines.sort(key=lambda line: line.seconds)
    told: dict[int, list[str]] = {}
    for line in fold(lines):
        for part in line.label.split(","):
            first, _, last = part.partition("-")
            for rank in range(int(first), int(last or first) + 1):
                told.setdefault(rank, []).append(line.text)
    assert told == {
        rank: [line.text for line in lines if line.rank == rank]
        for rank in {line.rank for line in lines}
    }
