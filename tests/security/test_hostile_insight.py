"""Files of a host with any content, which `report`, `top` and `status` read."""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzzing import JSON, changed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_jobs import WrittenJob

from clusterjob.backends.base import Status
from clusterjob.backends.shared import ended
from clusterjob.cli import efficiency as shown
from clusterjob.cli import metrics as shown_metrics
from clusterjob.core.records import Record
from clusterjob.insight import metrics, sample_files, silence
from clusterjob.insight.efficiency import efficiency
from clusterjob.insight.live_node import NodeReader
from clusterjob.insight.live_output import LiveOutput
from clusterjob.insight.report import page, values
from clusterjob.insight.report.gather import gather
from clusterjob.insight.report.make import stacks_of
from clusterjob.insight.report.measured import Measured
from clusterjob.node.logs import ends
from clusterjob.node.logs.events import read_phases
from clusterjob.node.logs.job_dir import METRICS, PHASES, TIMELINE
from clusterjob.node.logs.log_files import node_directory
from clusterjob.node.verdict import JobState

RUNNING = Status(JobState.RUNNING, "")
CPU_SECONDS = 10.0  # with the limits, reading a hostile file takes a tenth of it
HOSTILE_TEXT = "\"><img src=x onerror=alert(1)>\x1b[2J\x07\ud800</script><i a='`"
ODD = JSON | st.sampled_from(
    [HOSTILE_TEXT, HOSTILE_TEXT * 50, "=1+1", "9" * 5000, 5e-324, 1e308, 2**63, 1e12, 1 << 16, 1e18]
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Record:
    home = tmp_path_factory.mktemp("home")
    return WrittenJob(home, nodes=2, per_node=2, seconds=60, restarts=1).write()


def readers(record: Record) -> dict[str, Callable[[], Any]]:
    """Return what reads the files of a job."""
    nodes = [0, 1]

    def report() -> str:
        verdict = ends.read_result(record.job_dir) or record.verdict
        assert verdict is not None
        data = gather(record, ended(verdict), stacks_of(record))
        return page.render(lambda detail: values.of_job(data, detail))

    def csv() -> str:
        text = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        with contextlib.redirect_stdout(text):
            shown_metrics._print_csv(record, nodes, metrics.Wanted())
        text.flush()
        return text.buffer.getvalue().decode()

    def status() -> Any:
        found = efficiency(record, live=True)
        shown.lines(found)
        silence.hint(record, RUNNING)
        return found

    return {
        "report": report,
        "csv": csv,
        "status": lambda: json.dumps(status(), allow_nan=False),
        "top": lambda: [NodeReader(record.job_dir, node).read(ended=False) for node in nodes],
    }


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Return a file of lines of JSON in which some values are removed or replaced."""
    lines = data.split(b"\n")
    for _ in range(draw(st.integers(1, 6))):
        index = draw(st.integers(0, len(lines) - 1))
        with contextlib.suppress(ValueError):
            lines[index] = json.dumps(draw(changed(json.loads(lines[index]), ODD))).encode()
    return b"\n".join(lines)


@pytest.mark.parametrize("examples", [15, pytest.param(500, marks=pytest.mark.slow)])
def test_any_values_in_files_of_hosts_are_shown_or_skipped(written: Record, examples: int) -> None:
    paths = [path for path in written.job_dir.rglob("*") if path.is_file()]
    good = {path: path.read_bytes() for path in paths}
    json_files = [path for path in paths if path.suffix in (".json", ".jsonl")]

    @settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        for path in json_files:
            if path.suffix == ".json":
                text = json.dumps(json.loads(good[path])).encode()
            else:
                text = good[path]
            path.write_bytes(data.draw(damaged(text)))
        found = {name: read() for name, read in readers(written).items()}
        assert len(found["report"].encode()) <= page.MAX_BYTES
        assert "<img" not in found["report"]
        assert "<i " not in found["report"]
        assert found["report"].count("<script>") == 1
        assert not {"\x1b", "\x07"} & {*found["report"], *found["csv"]}
        assert ",=" not in found["csv"]

    try:
        run()
    finally:
        for path, text in good.items():
            path.write_bytes(text)


# -- limits ----------------------------------------------------------------------------------------


def sample_line(ranks: range, monotonic: float, more: str = "") -> bytes:
    workers = [[rank, 1, 1, 0, 0, 1] for rank in ranks]
    line = [1.0, monotonic, 0, 0, 1, 1, 1, 1, 1, 1, 1, workers, []]
    return (json.dumps(line)[:-1] + more + "]\n").encode()


HEADER = b'{"node_rank":0,"host":"h","attempt":0,"cores":1,"memory":1,"gpus":[]}\n'


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return WrittenJob(tmp_path, nodes=1, per_node=2, seconds=60).write()


def test_deeply_nested_sample_is_skipped(record: Record) -> None:
    nested = "," + "[" * 60_000 + "]" * 60_000
    with (node_directory(record.job_dir, 0) / METRICS).open("ab") as file:
        file.write(sample_line(range(1), 1.0, nested))
    for read in readers(record).values():
        read()


def test_short_lines_take_little_time(record: Record) -> None:
    """Without a limit, 32 million lines take minutes, at each `status`."""
    directory = node_directory(record.job_dir, 0)
    with (directory / METRICS).open("ab") as file:
        file.write(b"[1]\n" * (32 << 20))
    with (directory / PHASES).open("ab") as file:
        file.write(b"\n" * (16 << 20))
    begin = time.process_time()
    assert sample_files.latest(record.job_dir, 0) is None
    assert list(sample_files.read(record.job_dir, 0)) == []
    assert list(read_phases(record.job_dir, 0))
    assert time.process_time() - begin < CPU_SECONDS


def test_other_ranks_in_each_sample_do_not_fill_the_memory(record: Record) -> None:
    directory = node_directory(record.job_dir, 0)
    with (directory / METRICS).open("wb") as file:
        for number in range(120):
            ranks = range(512 * number, 512 * (number + 1))
            file.write(HEADER + sample_line(ranks, 1.0 + number))
        file.write(sample_line(range(1 << 16, (1 << 16) + 9), 200.0))
    measured = Measured()
    measured.find(record.job_dir, [0])
    measured.read(record.job_dir, lambda _node, _attempt, time: time, 300.0)
    assert len(measured.series[0]) <= 2048
    newest = sample_files.latest(record.job_dir, 0)
    assert newest[1].monotonic == 120.0  # a rank of the last sample is impossible


def test_timeline_that_grows_at_once_does_not_fill_the_memory(tmp_path: Path) -> None:
    (tmp_path / TIMELINE).write_text("1795000000.000 rank0.out 5\n")
    output = LiveOutput(tmp_path)
    output.read()
    assert output.newest == {0: 1795000000.0}
    os.truncate(tmp_path / TIMELINE, 256 << 20)
    tracemalloc.start()
    try:
        output.read()
        with (tmp_path / TIMELINE).open("ab") as file:
            file.write(b"\n1795000009.000 rank0.out 7\n")
        output.read()
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert output.newest == {0: 1795000009.0}


@pytest.mark.parametrize("cell", ["=1+1", "+1", "-1", "@SUM(1)", "\t=1"])
def test_csv_has_no_formula(cell: str) -> None:
    assert shown_metrics._csv_cell(cell) == f"'{cell}"
    assert shown_metrics._csv_cell("gpu-1") == "gpu-1"


def test_tab_in_a_line_does_not_move_the_columns_of_top() -> None:
    top_table = pytest.importorskip("clusterjob.cli.top_table")
    assert top_table._fitted("a\tb", 5, right=False) == "a b  "
