"""Output of many workers as one stream: in the order of time, whole lines, nothing lost, nothing
invented.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterjob.node.logs import log_files
from clusterjob.node.logs.folding import Folded, fold, ranges
from clusterjob.node.logs.log_files import Line, LogReader, Timeline, last_lines


class Node:
    """One node's log files, written as workers and the agent write them."""

    def __init__(self, job_dir: Path, node_rank: int) -> None:
        self.directory = log_files.node_directory(job_dir, node_rank)
        self.directory.mkdir(parents=True)
        self.timeline = Timeline(self.directory)

    def write(self, name: str, data: bytes | str, *, note: bool = True) -> None:
        with (self.directory / name).open("ab") as stream:
            stream.write(data if isinstance(data, bytes) else data.encode())
        if note:
            self.timeline.note()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every look at the files a time of its own."""
    seconds = itertools.count(1_700_000_000)
    monkeypatch.setattr(log_files.time, "time", lambda: float(next(seconds)))


def texts(lines: list[Line]) -> list[str]:
    return [line.text for line in lines]


# -- names ---------------------------------------------------------------------------------------------------------------------


def test_where_logs_lie(tmp_path: Path) -> None:
    directory = log_files.node_directory(tmp_path, 3)
    assert directory == tmp_path / "logs" / "node3"
    assert log_files.rank_files(directory, 5, restart=0) == (
        directory / "rank5.out",
        directory / "rank5.err",
    )
    assert log_files.rank_files(directory, 5, restart=2) == (
        directory / "rank5.restart2.out",
        directory / "rank5.restart2.err",
    )
    assert log_files.torchrun_files(directory, 0) == (
        directory / "torchrun.out",
        directory / "torchrun.err",
    )
    assert log_files.torchrun_files(directory, 1) == (
        directory / "torchrun.restart1.out",
        directory / "torchrun.restart1.err",
    )
    assert log_files.rank_files(directory, 5, restart=0, attempt=1) == (
        directory / "rank5.attempt1.out",
        directory / "rank5.attempt1.err",
    )
    assert (
        log_files.rank_files(directory, 5, restart=2, attempt=3)[0]
        == directory / "rank5.attempt3.restart2.out"
    )
    assert (
        log_files.torchrun_files(directory, 1, attempt=2)[1]
        == directory / "torchrun.attempt2.restart1.err"
    )


def test_workers_without_an_agent_are_read_as_they_write(tmp_path: Path) -> None:
    node = Node(tmp_path, 0)
    reader = LogReader(tmp_path)
    node.write("rank1.out", "one\ntw", note=False)
    node.write("rank0.err", "zero\n", note=False)
    assert reader.read() == [
        Line(0, 0, stream="err", text="zero"),
        Line(0, 1, stream="out", text="one"),
    ]
    assert reader.read() == []
    node.write("rank1.out", "o\nthree", note=False)
    assert texts(reader.read()) == ["two"]
    assert texts(reader.finish()) == ["three"]


# -- the order of time -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("clock")
def test_lines_of_all_nodes_come_in_the_order_of_time(tmp_path: Path) -> None:
    nodes = [Node(tmp_path, 0), Node(tmp_path, 1)]
    nodes[0].write("rank0.out", "one\n")
    nodes[1].write("rank1.err", "two\n")
    nodes[0].write("rank0.err", "three\n")
    nodes[0].write("rank0.out", "four\nfive\n")
    nodes[1].write("rank1.out", "six\n")
    reader = LogReader(tmp_path)
    assert reader.read() == [
        Line(0, 0, stream="out", text="one"), Line(1, 1, stream="err", text="two"), Line(0, 0, stream="err", text="three"),
        Line(0, 0, stream="out", text="four"), Line(0, 0, stream="out", text="five"), Line(1, 1, stream="out", text="six"),
    ]  # fmt: skip
    assert reader.read() == []
    assert reader.finish() == []


@pytest.mark.usefixtures("clock")
def test_a_reader_follows_what_grows(tmp_path: Path) -> None:
    reader = LogReader(tmp_path)
    assert reader.read() == reader.finish() == []
    node = Node(tmp_path, 0)
    assert reader.read() == []
    node.write("rank0.out", "one\ntw")
    assert texts(reader.read()) == ["one"]
    node.write("rank0.out", "o\nthree\nfo")
    assert texts(reader.read()) == ["two", "three"]
    node.write("rank0.out", "ur\n", note=False)
    assert reader.read() == []
    assert texts(reader.finish()) == ["four"]
    assert reader.finish() == []


@pytest.mark.usefixtures("clock")
def test_the_end_shows_lines_that_have_none(tmp_path: Path) -> None:
    node = Node(tmp_path, 0)
    node.write("rank0.out", "whole\npart")
    node.write("rank1.err", "other part", note=False)
    reader = LogReader(tmp_path)
    assert texts(reader.read()) == ["whole"]
    assert texts(reader.finish()) == ["part", "other part"]
    assert reader.finish() == []


@pytest.mark.usefixtures("clock")
def test_a_file_that_ends_in_a_line_break_has_no_empty_last_line(tmp_path: Path) -> None:
    node = Node(tmp_path, 0)
    node.write("rank0.out", "\none\n\n")
    assert texts(LogReader(tmp_path).finish()) == ["", "one", ""]


@pytest.mark.usefixtures("clock")
def test_restarts_are_read_after_each_other(tmp_path: Path) -> None:
    node = Node(tmp_path, 0)
    node.write("rank0.out", "first start\n")
    node.write("rank0.restart1.out", "second start\n")
    node.write("rank0.restart10.out", "eleventh start\n")
    assert LogReader(tmp_path).read() == [
        Line(0, 0, stream="out", text=f"{word} start") for word in ("first", "second", "eleventh")
    ]


@pytest.mark.usefixtures("clock")
def test_restarts_without_a_timeline_are_read_in_their_order(tmp_path: Path) -> None:
    node = Node(tmp_path, 0)
    for name in ("rank0.restart10.out", "rank0.out", "rank0.restart2.out"):
        node.write(name, f"{name}\n", note=False)
    assert texts(LogReader(tmp_path).finish()) == [
        "rank0.out",
        "rank0.restart2.out",
        "rank0.restart10.out",
    ]


STARTS = (
    "rank0.out",
    "rank0.restart2.out",
    "rank0.attempt2.out",
    "rank0.attempt2.restart1.out",
    "rank0.attempt10.out",
)


@pytest.mark.parametrize("noted", [False, True])
@pytest.mark.usefixtures("clock")
def test_attempts_are_read_in_their_order(tmp_path: Path, noted: bool) -> None:
    """What an agent wrote at its end may be noted by that of the next attempt, together with that
    one's first lines.
    """
    node = Node(tmp_path, 0)
    for name in sorted(STARTS):
        node.write(name, f"{name}\n", note=False)
    if noted:
        node.timeline.note()
        assert texts(LogReader(tmp_path).read()) == list(STARTS)
    assert texts(LogReader(tmp_path).finish()) == list(STARTS)
    assert texts(LogReader(tmp_path, attempt=2).finish()) == list(STARTS[2:4])
    assert texts(LogReader(tmp_path, attempt=0, rank=0).finish()) == list(STARTS[:2])


@pytest.mark.usefixtures("clock")
def test_a_torchrun_s_lines_have_no_rank(tmp_path: Path) -> None:
    node = Node(tmp_path, 1)
    node.write("torchrun.err", "W1105 torchrun says\n")
    node.write("torchrun.restart1.out", "again\n")
    assert LogReader(tmp_path).read() == [
        Line(1, None, stream="err", text="W1105 torchrun says"),
        Line(1, None, stream="out", text="again"),
    ]


@pytest.mark.usefixtures("clock")
def test_one_rank_or_one_node_may_be_asked_for(tmp_path: Path) -> None:
    for node_rank in range(2):
        node = Node(tmp_path, node_rank)
        for rank in (2 * node_rank, 2 * node_rank + 1):
            node.write(f"rank{rank}.out", f"of {rank}\n")
        node.write("rank10.out" if node_rank else "rank11.out", "ten or eleven\n")
    assert texts(LogReader(tmp_path, rank=1).finish()) == ["of 1"]
    assert texts(LogReader(tmp_path, rank=3).read()) == ["of 3"]
    assert texts(LogReader(tmp_path, node=1).finish()) == ["of 2", "of 3", "ten or eleven"]
    assert texts(LogReader(tmp_path, rank=1, node=1).finish()) == []


@pytest.mark.usefixtures("clock")
def test_files_that_are_no_logs_are_left_alone(tmp_path: Path) -> None:
    node = Node(tmp_path, 0)
    for name in (
        "store.log",
        "agent.log",
        "rank.out",
        "rank1.txt",
        "rank1.out.gz",
        "rankx.err",
        "xrank1.out",
        "core",
    ):
        node.write(name, "no log\n")
    (tmp_path / "logs" / "nodex").mkdir()
    (tmp_path / "logs" / "node7").touch()
    node.write("rank0.out", "a log\n")
    assert texts(LogReader(tmp_path, node=0).finish()) == ["a log"]


@pytest.mark.usefixtures("clock")
def test_progress_bars_show_what_is_left_standing(tmp_path: Path) -> None:
    node = Node(tmp_path, 0)
    node.write("rank0.err", b"10%\r50%\r100%\nnext\r\n\r\n7%\r")
    assert texts(LogReader(tmp_path).finish()) == ["100%", "next", "", "7%"]


@pytest.mark.usefixtures("clock")
def test_bytes_that_are_no_text_are_shown(tmp_path: Path) -> None:
    node = Node(tmp_path, 0)
    node.write("rank0.out", "☃".encode()[:2])
    reader = LogReader(tmp_path)
    assert reader.read() == []
    node.write("rank0.out", "☃".encode()[2:] + b"\n\xff\n\x85\xe2\x80\xa8\n")
    assert texts(reader.read()) == ["☃", "\ufffd", "\ufffd\u2028"]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    "junk",
    [
        b"17000",
        b"\n",
        b"x y z\n",
        b"1700000005.000 rank0.out\n",
        b"1700000005.000 rank0.out 5 6\n",
        b"\xff\xff\n",
        b"1700000005.000 rank0.ou",
        b"nan rank0.out 3\n",
    ],
)
def test_a_timeline_that_was_cut_off_or_spoilt_costs_the_order_alone(
    tmp_path: Path, junk: bytes
) -> None:
    """A full disk, or an agent that was killed while it wrote."""
    node = Node(tmp_path, 0)
    node.write("rank0.out", "one\n")
    node.write("timeline", junk, note=False)
    node.write("rank0.out", "two\n")
    node.write("rank0.out", "three\n")
    reader = LogReader(tmp_path)
    assert texts(reader.read() + reader.finish()) == ["one", "two", "three"]


@pytest.mark.usefixtures("clock")
def test_a_name_in_a_timeline_leads_nowhere_else(tmp_path: Path) -> None:
    node = Node(tmp_path, 0)
    (tmp_path / "logs" / "rank5.out").write_text("elsewhere\n")
    node.write(
        "timeline",
        "1700000000.000 ../rank5.out 10\n1700000000.000 /etc/passwd 10\n1700000000.000 rank6.out 10\n",
        note=False,
    )
    assert LogReader(tmp_path).finish() == []


def test_a_clock_that_is_set_back_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([100.0, 200.0, 50.0, 60.0])
    monkeypatch.setattr(log_files.time, "time", lambda: next(times))
    node = Node(tmp_path, 0)
    for number in range(4):
        node.write("rank0.out", f"{number}\n")
    assert texts(LogReader(tmp_path).finish()) == ["0", "1", "2", "3"]


def test_a_timeline_notes_growth_and_nothing_else(tmp_path: Path) -> None:
    node = Node(tmp_path, 0)
    node.timeline.note()
    assert not (node.directory / "timeline").exists()
    node.write("rank0.out", "")
    assert not (node.directory / "timeline").exists()
    node.write("rank0.out", "12345")
    node.timeline.note()
    node.write("rank0.err", "1", note=False)
    node.write("store.log", "1", note=False)
    node.timeline.note()
    assert [
        line.split()[1:] for line in (node.directory / "timeline").read_text().splitlines()
    ] == [["rank0.out", "5"], ["rank0.err", "1"]]


def test_a_timeline_of_a_directory_that_is_gone_is_quiet(tmp_path: Path) -> None:
    Timeline(tmp_path / "nowhere").note()


steps = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.integers(0, 1),
        st.sampled_from(["out", "err"]),
        st.text("ab\n", min_size=1, max_size=6),
        st.booleans(),
        st.booleans(),
    ),
    max_size=25,
)  # node, local rank, stream, what is written, whether the agent looks, whether the reader reads


@given(steps)
def test_nothing_is_lost_and_nothing_invented(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int, str, str, bool, bool]]
) -> None:
    job_dir = tmp_path_factory.mktemp("job", numbered=True)
    nodes = [Node(job_dir, 0), Node(job_dir, 1)]
    reader = LogReader(job_dir)
    written: dict[tuple[int, int, str], str] = {}
    seen: list[Line] = []
    for node_rank, local_rank, stream, text, note, read in steps:
        rank = 2 * node_rank + local_rank
        nodes[node_rank].write(f"rank{rank}.{stream}", text, note=note)
        written[node_rank, rank, stream] = written.get((node_rank, rank, stream), "") + text
        if read:
            seen += reader.read()
    seen += reader.finish()
    for (node_rank, rank, stream), text in written.items():
        mine = [
            line.text
            for line in seen
            if (line.node_rank, line.rank, line.stream) == (node_rank, rank, stream)
        ]
        assert "\n".join(mine) == text.removesuffix("\n")
    assert {(line.node_rank, line.rank, line.stream) for line in seen} <= written.keys()


def test_a_directory_that_goes_away_between_two_looks_is_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = LogReader(tmp_path)
    monkeypatch.setattr(reader, "_nodes", lambda: [0])
    assert reader.read() == reader.finish() == []


# -- last lines --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"", ()),
        (b"\n\n", ()),
        (b"one", ("one",)),
        (b"one\n\n  two  \n\n", ("one", "  two")),
        (b"\xff\n", ("\ufffd",)),
        (
            b"".join(b"%d\n" % number for number in range(100)),
            tuple(str(number) for number in range(80, 100)),
        ),
    ],
)
def test_last_lines(tmp_path: Path, content: bytes, wanted: tuple[str, ...]) -> None:
    (tmp_path / "file").write_bytes(content)
    assert last_lines(tmp_path / "file") == wanted


def test_last_lines_are_few_and_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10_000_000 + b"\nlast but one\nlast\n")
    assert last_lines(path, 1) == ("last",)
    found = last_lines(path, 20, limit=100)
    assert found[-2:] == ("last but one", "last")
    assert sum(map(len, found)) <= 100
    assert last_lines(tmp_path / "nowhere") == ()
    assert last_lines(tmp_path) == ()


def test_a_progress_bar_does_not_crowd_out_the_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(
        b"Traceback\n"
        + b"\r".join(b"%d%%" % number for number in range(101))
        + b"\nValueError: boom\n"
    )
    assert last_lines(path, 3) == ("Traceback", "100%", "ValueError: boom")


# -- folding -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "wanted"),
    [
        ([], []),
        ([3], ["3"]),
        ([0, 1], ["0-1"]),
        ([0, 1, 2, 5], ["0-2", "5"]),
        ([0, 2, 4, 5], ["0", "2", "4-5"]),
    ],
)
def test_ranges(numbers: list[int], wanted: list[str]) -> None:
    assert ranges(numbers) == wanted


@given(st.sets(st.integers(0, 60)))
def test_ranges_name_each_number_once(numbers: set[int]) -> None:
    named = []
    for part in ranges(sorted(numbers)):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(numbers)


def test_lines_that_ranks_write_alike_are_one() -> None:
    lines = [Line(0, rank, stream="out", text="loading") for rank in (0, 1, 2, 5)] + [
        Line(0, 3, stream="out", text="other")
    ]
    assert fold(lines) == [Folded("0-2,5", "out", text="loading"), Folded("3", "out", text="other")]


def test_streams_are_never_mixed() -> None:
    assert fold([Line(0, 0, stream="out", text="x"), Line(0, 1, stream="err", text="x")]) == [
        Folded("0", "out", text="x"),
        Folded("1", "err", text="x"),
    ]


def test_a_rank_s_own_repetitions_stay() -> None:
    assert fold([Line(0, 0, stream="out", text="x")] * 3) == [Folded("0", "out", text="x")] * 3


def test_torchruns_are_named_by_their_node() -> None:
    lines = [
        Line(1, None, stream="out", text="x"),
        Line(0, None, stream="out", text="x"),
        Line(0, 4, stream="out", text="x"),
    ]
    assert fold(lines) == [Folded("node0,node1,4", "out", text="x")]


def test_ranks_that_drifted_apart_are_told_apart() -> None:
    lines = [
        Line(0, 0, stream="out", text="a"),
        Line(0, 1, stream="out", text="b"),
        Line(0, 0, stream="out", text="b"),
        Line(0, 1, stream="out", text="a"),
    ]
    shown = fold(lines)
    assert [item.text for item in shown if "0" in item.label.replace("-", "0")][:1] == ["a"]
    assert Counter(rank for item in shown for rank in members(item.label)) == {0: 2, 1: 2}


def members(label: str) -> list[object]:
    """Return whom a label names: ranks as numbers, torchruns as words."""
    found: list[object] = []
    for part in label.split(","):
        if part.startswith("node"):
            found.append(part)
        else:
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
    return found


some_lines = st.lists(
    st.builds(
        Line,
        node_rank=st.integers(0, 1),
        rank=st.none() | st.integers(0, 4),
        stream=st.sampled_from(["out", "err"]),
        text=st.sampled_from(["a", "b", "c"]),
    ),
    max_size=40,
)


@given(some_lines)
def test_folding_keeps_each_rank_s_lines_in_their_order(lines: list[Line]) -> None:
    def by_writer(pairs: list[tuple[object, str, str]]) -> dict[tuple[object, str], list[str]]:
        found: dict[tuple[object, str], list[str]] = {}
        for who, stream, text in pairs:
            found.setdefault((who, stream), []).append(text)
        return found

    shown = fold(lines)
    said = by_writer(
        [
            (f"node{line.node_rank}" if line.rank is None else line.rank, line.stream, line.text)
            for line in lines
        ]
    )
    told = by_writer(
        [(who, item.stream, item.text) for item in shown for who in members(item.label)]
    )
    assert told == said
    assert len(shown) <= len(lines)


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=10),
    st.integers(1, 20),
)
def test_equal_output_of_all_ranks_is_shown_once(said: list[str], ranks: int) -> None:
    lines = [Line(0, rank, stream="out", text=text) for rank in range(ranks) for text in said]
    label = "0" if ranks == 1 else f"0-{ranks - 1}"
    assert fold(lines) == [Folded(label, "out", text=text) for text in said]
