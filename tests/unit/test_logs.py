"""Output of many workers as one stream of whole lines in time order, without loss."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import new_folder
from written_job import lines_of

from clusterjob.node.logs import log_files
from clusterjob.node.logs.log_files import LogLine, LogReader, Timeline, last_lines
from clusterjob.node.system.ranges import ranges


class Node:
    """One node's log files, written as workers and the agent write them."""

    def __init__(self, job_dir: Path, node_rank: int) -> None:
        self.directory = new_folder(log_files.node_directory(job_dir, node_rank))
        self.timeline = Timeline(self.directory)

    def write(self, name: str, data: bytes | str, *, note: bool = True) -> None:
        with (self.directory / name).open("ab") as stream:
            stream.write(data if isinstance(data, bytes) else data.encode())
        self.timeline.follow([self.directory / name])
        if note:
            self.timeline.note()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advance the clock by one second with each read of the time."""
    seconds = itertools.count(1_700_000_000)
    monkeypatch.setattr(log_files.time, "time", lambda: float(next(seconds)))


def texts(lines: list[LogLine]) -> list[str]:
    return [line.text for line in lines]


def test_timeline_keeps_files_that_another_thread_adds_while_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, 0)
    node.write("rank0.out", "first\n", note=False)
    measure = log_files.size_of

    def add_file(path: Path) -> int:
        node.write("rank0.restart1.out", "second\n", note=False)
        return measure(path)

    with monkeypatch.context() as patched:
        patched.setattr(log_files, "size_of", add_file)
        node.timeline.note()
    assert node.timeline.note() == ["rank0.restart1.out"]


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("restart", "attempt", "suffix"),
    [(0, 0, ""), (2, 0, ".restart2"), (0, 1, ".attempt1"), (2, 3, ".attempt3.restart2")],
)
def test_log_file_names_contain_rank_restart_and_attempt(
    tmp_path: Path, restart: int, attempt: int, suffix: str
) -> None:
    directory = log_files.node_directory(tmp_path, 3)
    assert directory == tmp_path / "logs" / "node3"
    pair = log_files.rank_files(directory, 5, restart=restart, attempt=attempt)
    assert pair == tuple(directory / f"rank5{suffix}.{stream}" for stream in ("out", "err"))


def test_logs_without_timeline_are_read_while_workers_write(tmp_path: Path) -> None:
    node = Node(tmp_path, 0)
    reader = LogReader(tmp_path)
    node.write("rank1.out", "one\ntw", note=False)
    node.write("rank0.err", "zero\n", note=False)
    assert lines_of(reader) == [
        LogLine(0, 0, stream="err", text="zero"),
        LogLine(0, 1, stream="out", text="one"),
    ]
    assert lines_of(reader) == []
    node.write("rank1.out", "o\nthree", note=False)
    assert texts(lines_of(reader)) == ["two"]
    assert texts(lines_of(reader, end=True)) == ["three"]


# -- time order ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("clock")
def test_lines_of_all_nodes_are_read_in_time_order(tmp_path: Path) -> None:
    nodes = [Node(tmp_path, 0), Node(tmp_path, 1)]
    nodes[0].write("rank0.out", "one\n")
    nodes[1].write("rank1.err", "two\n")
    nodes[0].write("rank0.err", "three\n")
    nodes[0].write("rank0.out", "four\nfive\n")
    nodes[1].write("rank1.out", "six\n")
    reader = LogReader(tmp_path)
    assert lines_of(reader) == [
        LogLine(0, 0, stream="out", text="one"),
        LogLine(1, 1, stream="err", text="two"),
        LogLine(0, 0, stream="err", text="three"),
        LogLine(0, 0, stream="out", text="four"),
        LogLine(0, 0, stream="out", text="five"),
        LogLine(1, 1, stream="out", text="six"),
    ]
    assert lines_of(reader) == []
    assert lines_of(reader, end=True) == []


STARTS = (
    "rank0.out",
    "rank0.restart2.out",
    "rank0.restart10.out",
    "rank0.attempt2.out",
    "rank0.attempt2.restart1.out",
    "rank0.attempt10.out",
)


@pytest.mark.parametrize("noted", [False, True])
@pytest.mark.usefixtures("clock")
def test_attempts_are_read_in_order(tmp_path: Path, noted: bool) -> None:
    """The next attempt's agent may write the timeline entry of an attempt's last lines."""
    node = Node(tmp_path, 0)
    for name in sorted(STARTS):
        node.write(name, f"{name}\n", note=False)
    if noted:
        node.timeline.note()
        assert texts(lines_of(LogReader(tmp_path))) == list(STARTS)
    assert texts(lines_of(LogReader(tmp_path), end=True)) == list(STARTS)
    assert texts(lines_of(LogReader(tmp_path, attempt=2), end=True)) == list(STARTS[3:5])
    assert texts(lines_of(LogReader(tmp_path, attempt=0, rank=0), end=True)) == list(STARTS[:3])


@pytest.mark.usefixtures("clock")
def test_reader_returns_lines_of_requested_rank_or_node(tmp_path: Path) -> None:
    for node_rank in range(2):
        node = Node(tmp_path, node_rank)
        for rank in (2 * node_rank, 2 * node_rank + 1):
            node.write(f"rank{rank}.out", f"of {rank}\n")
        node.write("rank10.out" if node_rank else "rank11.out", "ten or eleven\n")
    assert texts(lines_of(LogReader(tmp_path, rank=1), end=True)) == ["of 1"]
    assert texts(lines_of(LogReader(tmp_path, rank=3))) == ["of 3"]
    assert texts(lines_of(LogReader(tmp_path, node=1), end=True)) == [
        "of 2",
        "of 3",
        "ten or eleven",
    ]
    assert texts(lines_of(LogReader(tmp_path, rank=1, node=1), end=True)) == []


@pytest.mark.usefixtures("clock")
def test_files_with_other_names_are_not_read(tmp_path: Path) -> None:
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
    assert texts(lines_of(LogReader(tmp_path, node=0), end=True)) == ["a log"]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"\none\n\n", ["", "one", ""]),  # no empty line after the last newline
        (b"10%\r50%\r100%\nnext\r\n\r\n7%\r", ["100%", "next", "", "7%"]),
        ("☃\n".encode() + b"\xff\n\x85\xe2\x80\xa8\n", ["☃", "\ufffd", "\ufffd\u2028"]),
    ],
)
def test_lines_are_read_as_a_terminal_shows_them(
    tmp_path: Path, data: bytes, wanted: list[str]
) -> None:
    node, reader = Node(tmp_path, 0), LogReader(tmp_path)
    node.write("rank0.out", data[:2])
    found = lines_of(reader)
    node.write("rank0.out", data[2:])
    assert texts(found + lines_of(reader, end=True)) == wanted


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
def test_broken_timeline_loses_no_lines(tmp_path: Path, junk: bytes) -> None:
    """The disk was full, or the agent was killed while it wrote."""
    node = Node(tmp_path, 0)
    node.write("rank0.out", "one\n")
    node.write("timeline", junk, note=False)
    node.write("rank0.out", "two\n")
    node.write("rank0.out", "three\n")
    reader = LogReader(tmp_path)
    assert texts(lines_of(reader) + lines_of(reader, end=True)) == ["one", "two", "three"]


@pytest.mark.usefixtures("clock")
def test_timeline_entry_outside_node_directory_is_ignored(tmp_path: Path) -> None:
    node = Node(tmp_path, 0)
    (tmp_path / "logs" / "rank5.out").write_text("elsewhere\n")
    node.write(
        "timeline",
        "1700000000.000 ../rank5.out 10\n"
        "1700000000.000 /etc/passwd 10\n"
        "1700000000.000 rank6.out 10\n",
        note=False,
    )
    assert lines_of(LogReader(tmp_path), end=True) == []


def test_clock_set_back_loses_no_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 200.0, 50.0, 60.0])
    monkeypatch.setattr(log_files.time, "time", lambda: next(times))
    node = Node(tmp_path, 0)
    for number in range(4):
        node.write("rank0.out", f"{number}\n")
    assert texts(lines_of(LogReader(tmp_path), end=True)) == ["0", "1", "2", "3"]


def test_timeline_notes_only_growth_of_log_files(tmp_path: Path) -> None:
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
)  # node, local rank, stream, text, whether the agent notes it, whether the reader reads


@given(steps)
def test_reader_returns_exactly_lines_that_were_written(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int, str, str, bool, bool]]
) -> None:
    job_dir = tmp_path_factory.mktemp("job", numbered=True)
    nodes = [Node(job_dir, 0), Node(job_dir, 1)]
    reader = LogReader(job_dir)
    written: dict[tuple[int, int, str], str] = {}
    seen: list[LogLine] = []
    for node_rank, local_rank, stream, text, note, read in steps:
        rank = 2 * node_rank + local_rank
        nodes[node_rank].write(f"rank{rank}.{stream}", text, note=note)
        written[node_rank, rank, stream] = written.get((node_rank, rank, stream), "") + text
        if read:
            seen += lines_of(reader)
    seen += lines_of(reader, end=True)
    for (node_rank, rank, stream), text in written.items():
        mine = [
            line.text
            for line in seen
            if (line.node_rank, line.rank, line.stream) == (node_rank, rank, stream)
        ]
        assert "\n".join(mine) == text.removesuffix("\n")
    assert {(line.node_rank, line.rank, line.stream) for line in seen} <= written.keys()


def test_directory_removed_between_two_polls_raises_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = LogReader(tmp_path)
    monkeypatch.setattr(reader, "_nodes", lambda: [0])
    assert lines_of(reader) == lines_of(reader, end=True) == []


# -- last lines ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "count", "wanted"),
    [
        (b"", 20, ()),
        (b"\n\n", 20, ()),
        (b"one", 20, ("one",)),
        (b"one\n\n  two  \n\n", 20, ("one", "  two")),
        (b"\xff\n", 20, ("\ufffd",)),
        (b"a\nb\nc\n", 2, ("b", "c")),
        (b"Traceback\n0%\r50%\r100%\nboom\n", 3, ("Traceback", "100%", "boom")),
        (b"x" * 1_000_000 + b"\nlast\n", 20, ("x" * (8192 - 6), "last")),
    ],
)
def test_last_lines_are_few_and_as_a_terminal_shows_them(
    tmp_path: Path, content: bytes, count: int, wanted: tuple[str, ...]
) -> None:
    (tmp_path / "file").write_bytes(content)
    assert last_lines(tmp_path / "file", count) == wanted


def test_last_lines_of_what_is_no_file_are_empty(tmp_path: Path) -> None:
    """A host may put a pipe in place of an agent's log; to open it would block."""
    os.mkfifo(tmp_path / "pipe")
    assert [last_lines(tmp_path / name) for name in ("pipe", "nowhere", "")] == [(), (), ()]


@given(st.sets(st.integers(0, 60)))
def test_ranges_contain_each_number_once_in_the_fewest_parts(numbers: set[int]) -> None:
    named: list[int] = []
    for part in ranges(sorted(numbers)):
        first, _, last = part.partition("-")
        assert int(first) - 1 not in named
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(numbers)
