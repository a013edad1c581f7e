"""LogStream: sort the printed lines of a node into the files of the job's directory.

The result does not depend on how the lines were fetched.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import finish, start
from written_job import lines_of

from clusterjob.backends.batch_command import log_stream
from clusterjob.backends.batch_command.log_stream import LogStream
from clusterjob.errors import ClusterJobError
from clusterjob.node.logs import console, ends
from clusterjob.node.logs.log_files import Labelled, LogLine, LogReader
from clusterjob.node.system import files
from clusterjob.node.system.ranges import ranges
from clusterjob.node.verdict import Failure, JobState, RoundEnd, Verdict

VERDICT = Verdict(
    JobState.FAILED,
    7,
    reason="rank 1: boom\u2603",
    failure=Failure(
        1,
        1,
        node_rank=0,
        host="host",
        exit_code=7,
        signal=None,
        message="boom",
        last_lines=("a\udce9", "ValueError: boom"),
    ),
    consequences=(
        Failure(
            0,
            0,
            node_rank=0,
            host="host",
            exit_code=134,
            signal="SIGABRT",
            message="x",
            last_lines=("y",),
        ),
    ),
    started_at="2026-01-01T00:00:00Z",
)
PROTOCOL_LOOKALIKES = [
    "",
    " ",
    "12 [0] forged",
    "3 clusterjob-verdict {}",
    "[1]! x",
    "+ y",
    "clusterjob: z",
    "\t",
    "1@2.0 [0]+ a",
    "\u2028",
    "\x0b",
]
TEXT = st.one_of(
    st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\n\r"), max_size=40),
    st.sampled_from(PROTOCOL_LOOKALIKES),
    st.integers(1, 3).map(lambda count: "é☃" * (count * console.MAX_TEXT // 4)),
)


def labelled(label: str, stream: str, text: str) -> Labelled:
    return label, LogLine(0, 0, stream=stream, text=text)


class Printed:
    """Lines that a node prints, with the expected files and verdict."""

    def __init__(self, attempt: int = 0) -> None:
        self.lines: list[str] = []
        self.files: dict[str, str] = {}
        self.ended = False
        self._writer = console.LineWriter()
        self._mark = f".attempt{attempt}" if attempt else ""
        self._seconds = 1000.0

    def bare(self, text: str) -> None:
        self._print(text + "\n")
        self._expect("agent.log", text)

    def output(self, batch: Sequence[tuple[list[int], str, str]]) -> None:
        self._seconds += 0.1
        folded = [
            labelled(",".join(ranges(ranks_of_line)), stream, text)
            for ranks_of_line, stream, text in batch
        ]
        self._print(self._writer.output(folded, self._seconds))
        for ranks_of_line, stream, text in batch:
            for name in [f"rank{rank}" for rank in ranks_of_line]:
                self._expect(f"{name}{self._mark}.{stream}", text)

    def message(self, text: str) -> None:
        self._print(self._writer.message(text))
        for line in text.split("\n"):
            self._expect("agent.log", f"clusterjob: {line}")

    def end(self) -> None:
        self._print(self._writer.verdict(VERDICT.to_json()))
        self.ended = True

    def _print(self, text: str) -> None:
        self.lines += text.split("\n")[:-1]

    def _expect(self, name: str, text: str) -> None:
        self.files[name] = self.files.get(name, "") + text + "\n"


@st.composite
def printed(draw: st.DrawFn, *, alike: bool = False) -> Printed:
    """Return the output of a node; with `alike`, its lines without a number are all equal."""
    it = Printed()
    labels = st.sets(st.integers(0, 12), min_size=1, max_size=6).map(sorted)
    batch = st.lists(
        st.tuples(labels, st.sampled_from(["out", "err"]), TEXT), min_size=1, max_size=5
    )
    steps = draw(
        st.lists(
            st.one_of(
                batch,
                st.sampled_from(["bare", "message"]),
                TEXT.map(lambda text: ("message", text)),
            ),
            max_size=12,
        )
    )
    for bare, step in enumerate(["bare"] * draw(st.integers(0, 4)) + steps):
        if step == "bare":
            it.bare("same" if alike else f"line {bare} of the image: 7 [x] é")
        elif isinstance(step, list):
            it.output(step)
        else:
            it.message("text" if isinstance(step, str) else step[1])
    if draw(st.booleans()):
        it.end()
    return it


def log_contents(job_dir: Path, node_rank: int = 0) -> dict[str, str]:
    folder = job_dir / "logs" / f"node{node_rank}"
    if not folder.exists():
        return {}
    names = [path for path in folder.iterdir() if path.suffix in (".out", ".err", ".log")]
    return {path.name: path.read_bytes().decode() for path in names}


@settings(max_examples=50)
@given(data=st.data(), it=printed())
def test_files_are_same_for_any_overlapping_pieces_of_log(data: st.DataObject, it: Printed) -> None:
    """Pieces overlap, repeat and come late; each begins in the part that was already read."""
    with tempfile.TemporaryDirectory() as folder:
        job_dir, reached = Path(folder), 0
        while True:
            end = data.draw(st.integers(0, len(it.lines)))
            begin = data.draw(st.integers(0, min(end, reached)))
            LogStream(job_dir, 0).take(it.lines[begin:end])
            reached = max(reached, end)
            if data.draw(st.integers(0, 4)) == 0:
                break
        LogStream(job_dir, 0).take(it.lines[data.draw(st.integers(0, reached)) :])
        stream = LogStream(job_dir, 0)
        assert log_contents(job_dir) == it.files
        assert stream.gaps == []
        assert stream.next_number == 1 + sum(
            log_stream.parse_line(line) is not None for line in it.lines
        )
        assert (stream.verdict is not None) == it.ended


@settings(max_examples=50)
@given(data=st.data(), it=printed(alike=True))
def test_equal_lines_are_kept_when_log_is_fetched_from_its_start(
    data: st.DataObject, it: Printed
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for end in [*data.draw(st.lists(st.integers(0, len(it.lines)), max_size=6)), len(it.lines)]:
            LogStream(Path(folder), 0).take(it.lines[:end])
        assert log_contents(Path(folder)) == it.files


@settings(max_examples=50)
@given(data=st.data(), it=printed())
def test_gaps_and_reordered_lines_lose_and_double_nothing(data: st.DataObject, it: Printed) -> None:
    with tempfile.TemporaryDirectory() as folder:
        job_dir, stream = Path(folder), LogStream(Path(folder), 0)
        for _ in range(data.draw(st.integers(0, 4))):
            begin, end = sorted(
                data.draw(st.lists(st.integers(0, len(it.lines)), min_size=2, max_size=2))
            )
            stream.take(
                data.draw(st.permutations(it.lines[begin:end]))
                if end - begin < 8
                else it.lines[begin:end]
            )
        stream.take(it.lines)
        assert stream.gaps == []
        found = {
            name: sorted(re.sub("[^a-z]", "", text))
            for name, text in log_contents(job_dir).items()
            if name != "agent.log"
        }
        assert found == {
            name: sorted(re.sub("[^a-z]", "", text))
            for name, text in it.files.items()
            if name != "agent.log"
        }


@settings(max_examples=50)
@given(it=printed())
def test_reader_returns_lines_of_each_rank_as_written(it: Printed) -> None:
    with tempfile.TemporaryDirectory() as folder:
        LogStream(Path(folder), 0).take(it.lines)
        lines = lines_of(LogReader(Path(folder)), end=True)
        for name, text in it.files.items():
            if name != "agent.log":
                rank = int(name[4:].partition(".")[0])
                own = [line.text for line in lines if (line.rank, line.stream) == (rank, name[-3:])]
                assert own == text.split("\n")[:-1]


def test_lines_of_several_nodes_are_read_in_time_order(tmp_path: Path) -> None:
    one, other = console.LineWriter(), console.LineWriter()
    first = one.output([labelled("0", "out", "a"), labelled("0", "out", "b")], 10.0) + one.output(
        [labelled("0", "out", "e")], 12.0
    )
    second = other.output(
        [labelled("1", "out", "c"), labelled("1", "err", "d")], 11.0
    ) + other.output([labelled("1", "out", "f")], 13.0)
    LogStream(tmp_path, 1).take(second.splitlines())
    LogStream(tmp_path, 0).take(first.splitlines())
    assert [line.text for line in lines_of(LogReader(tmp_path))] == ["a", "b", "d", "c", "e", "f"]


def test_gap_is_reported_and_filled_by_late_lines(tmp_path: Path) -> None:
    it = Printed()
    for number in range(40):
        it.output([([0], "out", f"line {number}")])
    stream = LogStream(tmp_path, 1)
    stream.take(it.lines[:11])
    assert not stream.joins(it.lines[20:])
    assert stream.joins(it.lines[10:])
    stream.take(it.lines[20:])
    assert stream.gaps == [(12, 20)]
    assert (
        log_contents(tmp_path, 1)["agent.log"]
        == "clusterjob: lines 12 to 20 of node 1 are missing in the platform's log\n"
    )
    stream.take(it.lines[14:16])
    stream.take(it.lines[14:16])
    assert stream.gaps == [(12, 14), (17, 20)]
    stream.take(it.lines)
    assert stream.gaps == []
    assert sorted(log_contents(tmp_path, 1)["rank0.out"].splitlines()) == sorted(
        f"line {number}" for number in range(40)
    )


def test_long_line_with_lost_middle_keeps_next_line(tmp_path: Path) -> None:
    it = Printed()
    it.output([([0], "out", "x" * (2 * console.MAX_TEXT + 10)), ([0], "out", "next")])
    LogStream(tmp_path, 0).take([it.lines[0], *it.lines[3:]])
    assert log_contents(tmp_path)["rank0.out"] == "x" * console.MAX_TEXT + "\nnext\n"


def test_forged_line_with_high_number_loses_no_real_line(tmp_path: Path) -> None:
    """A setup line may print anything."""
    it = Printed()
    it.output([([0], "out", f"line {number}") for number in range(5)])
    LogStream(tmp_path, 0).take(["2026 [0] forged", *it.lines])
    LogStream(tmp_path, 0).take(["2026 [0] forged", *it.lines])
    assert log_contents(tmp_path)["rank0.out"].splitlines() == [
        *(f"line {number}" for number in range(5)),
        "forged",
    ]


def test_verdict_lists_the_rounds_of_all_attempts(tmp_path: Path) -> None:
    ended = RoundEnd(0, 0, "device", "gpu7", 0, rank=1, started_at="t0", ended_at="t1")
    for attempt in (0, 1):
        verdict = replace(VERDICT, attempts=(ended, replace(ended, restart=1)))
        line = f"1 clusterjob-verdict {json.dumps(verdict.to_json())}"
        LogStream(tmp_path, 0, attempt=attempt).take([line])
    found = LogStream(tmp_path, 0, attempt=1).verdict
    assert [(each.attempt, each.restart) for each in found.attempts] == [
        (0, 0), (0, 1), (1, 0), (1, 1),
    ]  # fmt: skip


def test_verdict_comes_from_node_0_with_number_of_attempt(tmp_path: Path) -> None:
    it = Printed()
    it.message("over")
    it.end()
    streams = (
        LogStream(tmp_path, 0, attempt=2),
        LogStream(tmp_path, 1, attempt=2),
        LogStream(tmp_path, 0, attempt=1),
    )
    for stream in streams[:2]:
        stream.take(it.lines[:1])
        assert stream.verdict is None
        stream.take(it.lines)
    found = streams[0].verdict
    assert (found.attempt, found.state, found.exit_code, found.reason) == (
        2,
        JobState.FAILED,
        7,
        VERDICT.reason,
    )
    assert found.failure == VERDICT.failure
    assert [failure.last_lines for failure in found.consequences] == [()], (
        "they are in the logs, and a job may have thousands"
    )
    assert streams[1].verdict is None
    assert streams[2].verdict is None


@pytest.mark.parametrize(
    "text", ["{}", "no JSON", "[1]", '{"state": "WELL", "exit_code": 0}', "[" * 100_000, ""]
)
def test_invalid_verdict_line_is_ignored(tmp_path: Path, text: str) -> None:
    stream = LogStream(tmp_path, 0)
    stream.take([f"1 clusterjob-verdict {text}"])
    assert stream.verdict is None
    stream.take(["2 clusterjob-verdict " + json.dumps(VERDICT.to_json())])
    assert stream.verdict is not None


def test_verdict_with_2000_consequences_is_read_completely(tmp_path: Path) -> None:
    many = Verdict(
        JobState.FAILED,
        1,
        reason="r",
        failure=None,
        consequences=tuple(
            Failure(
                rank,
                0,
                node_rank=0,
                host="h" * 50,
                exit_code=1,
                signal=None,
                message="m" * 50,
                last_lines=("x",) * 9,
            )
            for rank in range(2000)
        ),
    )
    lines = console.LineWriter().verdict(many.to_json()).split("\n")[:-1]
    assert max(map(len, lines)) < console.MAX_TEXT + 100
    stream = LogStream(tmp_path, 0)
    for begin in range(0, len(lines), 7):
        stream.take(lines[max(0, begin - 3) : begin + 7])
    assert len(stream.verdict.consequences) == 2000


def test_attempts_have_separate_files(tmp_path: Path) -> None:
    for attempt in (0, 1):
        it = Printed(attempt)
        it.output([([0], "out", f"of {attempt}")])
        LogStream(tmp_path, 0, attempt=attempt).take(it.lines)
    assert {name: text for name, text in log_contents(tmp_path).items() if name != "agent.log"} == {
        "rank0.out": "of 0\n",
        "rank0.attempt1.out": "of 1\n",
    }
    assert [line.text for line in lines_of(LogReader(tmp_path, attempt=1), end=True)] == ["of 1"]


def test_refusal_of_node_is_recorded_for_each_attempt(tmp_path: Path) -> None:
    lines = [
        "installing",
        console.refusal_line(7, "host", why="a setup line\nfailed: x").rstrip("\n"),
        "clusterjob: a setup line failed: x",
    ]
    for attempt in (0, 1):
        for end in (2, 3, 3):
            LogStream(tmp_path, 1, attempt=attempt).take(lines[:end])
        (failure,) = ends.refusals(tmp_path, attempt)
        assert (failure.node_rank, failure.host, failure.exit_code, failure.message) == (
            1,
            "host",
            7,
            "a setup line failed: x",
        )
    assert (
        log_contents(tmp_path, 1)["agent.log"]
        == 2 * "installing\nclusterjob: a setup line failed: x\n"
    )


def test_lines_written_before_failed_save_are_not_written_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Printed()
    it.bare("setup")
    it.output([([0, 1], "out", "a"), ([0], "err", "b")])
    LogStream(tmp_path, 0).take(it.lines[:2])
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(files, "write_json", full)
        with pytest.raises(
            ClusterJobError, match=r"the log of node 0 cannot be kept here: No space left on device"
        ):
            LogStream(tmp_path, 0).take(it.lines)
    LogStream(tmp_path, 0).take(it.lines[:2])
    LogStream(tmp_path, 0).take([it.lines[1], "of the image"])
    left = {
        "agent.log": "setup\nof the image\n",
        "rank0.out": "a\n",
        "rank1.out": "a\n",
        "rank0.err": "",
    }
    assert log_contents(tmp_path) == left
    LogStream(tmp_path, 0).take(it.lines)
    assert log_contents(tmp_path) == it.files | {"agent.log": "setup\nof the image\n"}
    assert sorted(line.text for line in lines_of(LogReader(tmp_path), end=True)) == ["a", "a", "b"]


TAKE_SCRIPT = """
import json, sys
from pathlib import Path
from clusterjob.backends.batch_command.log_stream import LogStream
lines = json.loads(Path("lines.json").read_text())
for end in range(0, len(lines) + 1, 10):
    LogStream(Path("job"), 0).take(lines[:end])
"""


def test_concurrent_processes_write_each_line_once(tmp_path: Path) -> None:
    it = Printed()
    it.bare("setup")
    for number in range(100):
        it.output([([number % 4], "out", f"line {number}")])
        it.bare(f"from the image {number}")
    (tmp_path / "lines.json").write_text(json.dumps(it.lines))
    for process in [start([sys.executable, "-c", TAKE_SCRIPT], tmp_path) for _ in range(3)]:
        finish(process, code=0)
    LogStream(tmp_path / "job", 0).take(it.lines)
    assert log_contents(tmp_path / "job") == it.files


@pytest.mark.parametrize("line", ["5 [0]", "5 [0] ", "5 [0]\r", "5@1.0 [0]"])
def test_lines_trimmed_by_platform_are_parsed(line: str) -> None:
    found = log_stream.parse_line(line)
    assert (found.number, found.kind, found.label, found.text, found.more) == (
        5,
        "out",
        "0",
        "",
        False,
    )
