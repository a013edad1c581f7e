"""Progress bars on a real terminal: one line per rank changes in place while the job runs."""

from __future__ import annotations

import os
import pty
import re
import sys
from pathlib import Path

import pytest
from commands import CLUSTERJOB, command
from launching import new_folder
from screens import Tmux
from terminals import Terminal, show

from clusterjob.cli import output
from clusterjob.cli.watch import Watch
from clusterjob.core.live import Live
from clusterjob.core.records import Record
from clusterjob.node.logs.console import LiveLines
from clusterjob.node.logs.log_files import LogLine, LogReader, Timeline, node_directory
from clusterjob.node.verdict import JobState, Verdict

pytestmark = pytest.mark.usefixtures("plain_python")
LAUNCH = [sys.executable, "-S", "-m", "clusterjob", "launch"]
BAR = """
import os, sys, time
rank = os.environ["RANK"]
for percent in range(0, 101, 10):
    sys.stderr.write(f"\\r{percent:3}%|{'#' * (percent // 10):10}| rank {rank}")
    sys.stderr.flush()
    if percent == 50:
        print("half of", rank, flush=True)
    while percent == 70 and not os.path.exists("go"):
        time.sleep(0.01)
print("over", file=sys.stderr)
"""


@pytest.mark.parametrize("start", [[*CLUSTERJOB, "run"], LAUNCH], ids=["run", "launch"])
def test_progress_bars_of_two_ranks_change_in_place(tmp_path: Path, start: list[str]) -> None:
    (tmp_path / "train.py").write_text(BAR)
    with Tmux(tmp_path, columns=100) as screen:
        screen.start([*start, "--nproc-per-node", "2", "train.py"])
        for rank in (0, 1):
            screen.wait_for(f"[{rank}]  70%|#######   | rank {rank}")
        (tmp_path / "go").touch()
        for rank in (0, 1):
            shown = screen.wait_for(f"[{rank}] 100%|##########| rank {rank}over")
    assert "70%" not in shown, "a bar's old states are taken away"
    for rank in (0, 1):
        assert f"[{rank}] half of {rank}" in shown


@pytest.mark.parametrize("columns", [10, 40])
def test_live_lines_fit_terminal_and_extra_lines_are_counted(columns: int) -> None:
    program = """
from clusterjob.node.logs.console import LiveLines
live = LiveLines()
live.show([f"{number} \\x1b]0;title\\x07" + "\\u4e2d" * 50 for number in range(30)])
print("=", flush=True)
live.show(["again"])
live.clear()
"""
    code, text = show([sys.executable, "-c", program], columns=columns, rows=8)
    assert code == 0, text
    first = text.partition("=")[0].splitlines()
    assert len(first) == 7
    assert first[-1].startswith("... and 2")
    assert all(
        sum(2 if character == "\u4e2d" else 1 for character in line) < columns
        for line in first[:-1]
    )
    assert "\x1b]" not in text
    assert text.endswith("\r\x1b[J")


def test_output_to_pipe_has_no_live_lines(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    (tmp_path / "train.py").write_text(BAR)
    done = command(tmp_path, "run", "--nproc-per-node", "2", "train.py")
    assert "\x1b" not in done.stdout + done.stderr
    assert "70%" not in done.stderr


def ended_job(directory: Path) -> Record:
    return Record(
        "job-000001",
        "x",
        cluster="local",
        backend="local",
        job_dir=directory,
        nodes=1,
        submitted_at="2026-01-01T00:00:00Z",
        spec={"nproc_per_node": 4},
        end=Verdict(JobState.SUCCEEDED, 0).to_json(),
    )


@pytest.mark.parametrize("terminal", [False, True])
def test_watch_folds_lines_and_reads_open_lines_once_per_poll(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
) -> None:
    directory = new_folder(node_directory(tmp_path, 0))
    for rank in range(4):
        (directory / f"rank{rank}.out").write_text("ready\n")
    Timeline(directory).note()
    readers: list[LogReader] = []
    monkeypatch.setattr(LogReader, "open_lines", lambda reader: readers.append(reader) or [])
    monkeypatch.setattr(output, "live", Live())
    monkeypatch.setattr(LiveLines, "has_terminal", terminal)
    assert Watch(ended_job(tmp_path)).to_the_end() == 0
    assert capsys.readouterr().out == "[0-3] ready\n"
    assert len(readers) == terminal


def test_closed_terminal_ends_only_live_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, follower = pty.openpty()
    with open(follower, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        live = LiveLines()
        assert live.has_terminal
        os.close(controller)
        live.show(["10%"])
        assert not live.has_terminal


def test_held_traceback_is_bounded(tmp_path: Path) -> None:
    watch = Watch(ended_job(tmp_path))
    first = LogLine(0, 0, "err", "Traceback (most recent call last):")
    lines = [first, *[LogLine(0, 0, "err", "x" * 1000)] * 10_000]
    assert watch._without_tracebacks(lines[:1000]) == []
    assert watch._without_tracebacks(lines[1000:]) == lines
    assert watch._without_tracebacks(lines[1:]) == lines[1:]


def test_tracebacks_that_follow_from_the_root_cause_are_folded(tmp_path: Path) -> None:
    """A traceback that the script survives is shown after 2 s, in its place in the output."""
    (tmp_path / "train.py").write_text(
        "import os, signal, sys, time, traceback\n"
        "rank = int(os.environ['RANK'])\n"
        "def end(*_): raise ConnectionError('closed by peer')\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "try: raise OSError('survived')\n"
        "except OSError: traceback.print_exc()\n"
        "open(f'up{rank}', 'w').close()\n"
        "while not os.path.exists('up0') or not os.path.exists('go'): time.sleep(0.01)\n"
        "if rank == 1: raise ValueError('root')\n"
        "time.sleep(60)\n"
    )
    argv = [*CLUSTERJOB, "run", "--nproc-per-node", "2", "train.py"]
    with Terminal(argv, cwd=tmp_path) as terminal:
        terminal.read_until(b"OSError: survived")
        (tmp_path / "go").touch()
        assert terminal.finish() == 1
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.shown.decode())
    assert text.index("[1] ValueError: root") < text.index("FAILED: rank 1")
    assert "closed by peer" not in text.partition("FAILED: rank 1")[0]
    assert re.search(r"their tracebacks: clusterjob logs train-\w+ --rank 0\b", text)


def test_ctrl_c_prints_one_traceback_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time\nprint('up' + os.environ['RANK'], flush=True)\ntime.sleep(60)\n"
    )
    argv = [*CLUSTERJOB, "run", "--nproc-per-node", "2", "train.py"]
    with Terminal(argv, cwd=tmp_path, controlling=True) as terminal:
        for rank in (b"0", b"1"):
            terminal.read_until(b"[%s] up%s" % (rank, rank))
        terminal.type(b"\x03")
        assert terminal.finish() == 130
    text = terminal.shown.decode()
    assert text.count("Traceback (most recent call last)") == 1
    assert text.count('File "') == text.count("train.py") == 1, text
