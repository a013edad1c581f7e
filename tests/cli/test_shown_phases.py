"""The phases that `run`, `submit --follow` and `status --watch` show, on real terminals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from commands import CLUSTERJOB
from procs import TEST_TIMEOUT, wait_until
from screens import Tmux
from ssh_network import python_without_torch
from terminals import Terminal

from clusterjob.backends.base import JobPhase, JobProgress, Status
from clusterjob.cli import colours, watch_status
from clusterjob.cli.phase_text import PhaseClock, phase_text
from clusterjob.core.record_index import ListRow
from clusterjob.node.verdict import Failure, JobState, Verdict

RUN = [*CLUSTERJOB, "run", "--cluster", "local"]
# Each file lets the job go on: `import` ends the import of torch, `end` the program.
WAIT = "while not os.path.exists({!r}): time.sleep(0.01)\n"
TORCH = f"import os, time\n{WAIT.format('import')}raise ModuleNotFoundError(name='torch')\n"
SCRIPT = f"import os, time\nprint('hello', flush=True)\n{WAIT.format('end')}print('bye')\n"
SLOW_NODE = '[ "$CLUSTERJOB_NODE_RANK" = 0 ] || until [ -e node ]; do sleep 0.05; done'


@pytest.fixture(autouse=True)
def _interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let jobs use an interpreter without torch, which starts ten times faster."""
    monkeypatch.setenv("CLUSTERJOB_PYTHON", str(python_without_torch(tmp_path)))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Return a directory with the script, and a torch whose import waits."""
    place = tmp_path / "work"
    (place / "slow" / "torch").mkdir(parents=True)
    (place / "slow" / "torch" / "__init__.py").write_text(TORCH)
    (place / "train.py").write_text(SCRIPT)
    return place


def slow(work: Path, *words: str) -> list[str]:
    """Return a command line whose job has two nodes and the torch that waits."""
    path = f"PYTHONPATH={work / 'slow'}"
    return [*words, "--nodes", "2", "--env", path, "--setup", SLOW_NODE, "train.py"]


@pytest.mark.parametrize("command", ["run", "follow", "watch"])
def test_terminal_shows_each_phase(work: Path, command: str) -> None:
    start = RUN if command == "run" else [*CLUSTERJOB, "submit", "--cluster", "local"]
    argv = slow(work, *start, *(["--follow"] if command == "follow" else []))
    if command == "watch":
        job_id = subprocess.check_output(argv, cwd=work, text=True).strip()
        argv = [*CLUSTERJOB, "status", "--watch", job_id]
    with Terminal(argv, cwd=work, columns=150) as terminal:
        terminal.read_until(b"1 of 2 nodes joined")
        (work / "node").touch()
        terminal.read_until(b"importing torch")
        (work / "import").touch()
        terminal.read_until(b"running")
        (work / "end").touch()
        assert terminal.finish() == 0
    shown = terminal.shown.decode()
    assert "SUCCEEDED" in shown.rpartition("running")[2]
    assert "\x1b[?25l" not in shown or command == "watch"


def test_pipe_gets_one_plain_line_per_phase(work: Path) -> None:
    shown = work / "err"
    with (work / "out").open("wb") as out, shown.open("wb") as err:
        process = subprocess.Popen(
            slow(work, *RUN), cwd=work, stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
    wait_until(lambda: "waiting for node 1" in shown.read_text(), TEST_TIMEOUT, "the reason")
    (work / "node").touch()
    wait_until(lambda: "importing torch" in shown.read_text(), TEST_TIMEOUT, "the import")
    assert "importing torch" in subprocess.check_output([*CLUSTERJOB, "status"], text=True)
    (work / "import").touch()
    wait_until(lambda: ": running" in shown.read_text(), TEST_TIMEOUT, "running")
    (work / "end").touch()
    assert process.wait(TEST_TIMEOUT) == 0
    printed = set((work / "out").read_text().splitlines())
    assert {line.partition("] ")[2] for line in printed} == {"hello", "bye"}
    text = shown.read_text()
    assert "\x1b" not in text
    assert "\r" not in text
    lines = text.splitlines()
    assert len(set(lines)) == len(lines)
    phases = ["1 of 2 nodes joined", "importing torch", "running"]
    found = [line for line in lines if line.removeprefix("clusterjob: ") in phases]
    assert found == [f"clusterjob: {phase}" for phase in phases]
    assert lines[-1].endswith("SUCCEEDED")


def test_dumb_terminal_gets_plain_lines(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    (work / "end").touch()
    with Terminal([*RUN, "train.py"], cwd=work) as terminal:
        assert terminal.finish() == 0
    assert b"\x1b" not in terminal.shown
    assert b"clusterjob: starting the agents" in terminal.shown


def test_status_watch_without_terminal_prints_table_when_phase_changes(work: Path) -> None:
    submit = [*CLUSTERJOB, "submit", "--cluster", "local", "train.py"]
    job_id = subprocess.check_output(submit, cwd=work, text=True).strip()
    watch = [*CLUSTERJOB, "status", "--watch", job_id]
    lines = []
    with subprocess.Popen(watch, cwd=work, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if line.rstrip().endswith("  running"):
                shown = subprocess.check_output([*CLUSTERJOB, "status", "--json", job_id])
                progress = json.loads(shown)["jobs"][0]["progress"]
                assert (progress["phase"], progress["total"]) == ("start", 1)
                assert progress["seconds"] >= 0
                (work / "end").touch()
    assert process.wait(TEST_TIMEOUT) == 0
    tables = [line for line in lines if line.startswith(job_id)]
    assert len(set(tables)) == len(tables)
    refused = subprocess.run(
        [*CLUSTERJOB, "status", "--watch", "--json"], capture_output=True, text=True, check=False
    )
    assert (refused.returncode, "--json and --watch" in refused.stderr) == (2, True)


def test_narrow_table_leaves_out_columns_for_the_phase() -> None:
    row = ListRow("train-e7trvw", "RUNNING", "", "2", "hpc", "2026-01-01T00:00:00Z", "")
    assert "nodes" in watch_status._columns_for([row], 100)
    assert watch_status._columns_for([row], 64) == ["id", "state", "code", "duration"]
    assert watch_status._columns_for([row], 20) == ["id", "state"]


def test_terminal_keeps_reason_of_restart(work: Path) -> None:
    (work / "fails.py").write_text("import time; time.sleep(2); raise SystemExit(3)\n")
    with Terminal([*RUN, "--max-restarts", "1", "fails.py"], cwd=work, columns=150) as terminal:
        assert terminal.finish() == 3
    shown = terminal.shown.decode()
    assert shown.count("clusterjob: restart 1: rank 0 (node 0, ") == 1
    assert "after 1 restart" in shown.partition("clusterjob: restart 1")[2]


@pytest.mark.parametrize("columns", [80, 30])
def test_live_line_stays_below_output_and_disappears(work: Path, columns: int) -> None:
    with Tmux(work, columns=columns) as screen:
        screen.start([*RUN, "train.py"])
        before = screen.wait_for("running").splitlines()
        assert before[-1].startswith("running")
        assert before[-2] == "hello"
        for width in (20, 100, columns):
            screen.resize(width)
            wait_until(lambda: screen.screen().count("running") == 1, TEST_TIMEOUT, "one line")
        (work / "end").touch()
        screen.wait_for("SUCCEEDED")
        text = wait_until(
            lambda: (now := screen.screen()).endswith("$") and now, TEST_TIMEOUT, "the prompt"
        )
        assert screen.cursor()[0]
    *_, hello, bye, verdict, prompt = text.splitlines()
    assert (hello, bye, prompt) == ("hello", "bye", "$")
    assert verdict.endswith("SUCCEEDED")


def test_narrower_terminal_keeps_no_part_of_wrapped_line(work: Path) -> None:
    with Tmux(work, columns=100) as screen:
        screen.start(slow(work, *RUN))
        screen.wait_for("waiting for node 1")
        above = screen.screen().splitlines()[:-1]
        screen.resize(22)  # the line takes two rows until it is shown again
        wait_until(lambda: "waiting" not in screen.screen(), TEST_TIMEOUT, "a shorter line")
        screen.resize(100)
        screen.wait_for("waiting for node 1")
        assert screen.screen().splitlines()[:-1] == above
        for name in ("node", "import", "end"):
            (work / name).touch()
        assert "nodes joined" not in screen.wait_for("SUCCEEDED")


@pytest.mark.parametrize("key", ["C-c", "TERM"])
def test_interrupt_or_sigterm_leaves_clean_terminal(work: Path, key: str) -> None:
    with Tmux(work) as screen:
        screen.start(["sh", "-c", 'echo $$ > pid; exec "$@"', "sh", *RUN, "train.py"])
        screen.wait_for("running")
        if key == "C-c":
            screen.press("C-c")
        else:
            os.kill(int((work / "pid").read_text()), signal.SIGTERM)
        text = wait_until(
            lambda: (now := screen.screen()).endswith("$") and now, TEST_TIMEOUT, "the prompt"
        )
        assert "running" not in text
        assert ("CANCELLED" in text) == (key == "C-c")
        assert screen.cursor()[0]
        screen.start(["stty", "-a"])
        assert " echo " in screen.wait_for("icanon")


def test_prompt_is_last_on_terminal_and_typed_text_stays(work: Path) -> None:
    (work / "train.py").write_text(
        "import sys, time\nname = input('name? ')\nprint('<', name, sep='')\n"
        "print('>' + sys.stdin.readline(), flush=True)\n"
    )
    with Terminal([*RUN, "train.py"], cwd=work, controlling=True) as terminal:
        terminal.answer(b"name? ", "a")
        terminal.read_until(b"<a")
        terminal.read_until(b"\r\x1b[J", TEST_TIMEOUT)  # the line goes when rank 0 reads
        terminal.type(b"b\n")
        terminal.read_until(b">b")
        assert terminal.finish() == 0


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_verdict_on_terminal_is_coloured_unless_no_color(
    work: Path, monkeypatch: pytest.MonkeyPatch, no_color: str, coloured: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    (work / "train.py").write_text("raise ValueError('boom')\n")
    with Terminal([*RUN, "train.py"], cwd=work) as terminal:
        assert terminal.finish() == 1
    assert (b"\x1b[1m\x1b[31mFAILED\x1b[0m: rank 0" in terminal.shown) == coloured
    assert (b"\x1b[31m  | ValueError: boom\x1b[0m" in terminal.shown) == coloured
    assert (b"\x1b[3" in terminal.shown) == coloured


def failure(rank: int | None, *, effect: bool) -> Failure:
    return Failure(rank, rank, 3, "h", 1, None, message="boom", effect=effect)


def test_consequences_are_folded_into_ranges() -> None:
    ranks = [rank for rank in range(300) if rank != 5]
    verdict = Verdict(
        JobState.FAILED,
        1,
        reason="r",
        consequences=tuple(failure(rank, effect=True) for rank in (*ranks, None)),
    )
    text = "  299 ranks and 1 node failed as a consequence: 0-4, 6-299, node 3"
    assert verdict.text() == f"FAILED: r\n{text}"
    shown = colours.verdict_text(Verdict(JobState.CANCELLED, 143, reason="\x1b[2J"), coloured=True)
    assert shown == "\x1b[1m\x1b[33mCANCELLED\x1b[0m: \\x1b[2J"


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (Status(JobState.PENDING, "Resources"), "queued: Resources"),
        (
            Status(JobState.PENDING, "queued; expected to start at 9"),
            "queued; expected to start at 9",
        ),
        (Status(JobState.UNKNOWN, "no answer"), "no answer"),
        (Status(JobState.RUNNING), "starting the agents"),
        (Status(JobState.RUNNING, started_at="2026-01-01T00:00:00Z"), "running"),
        (
            Status(JobState.PENDING, progress=JobProgress(JobPhase.NODES, 3, 4)),
            "3 of 4 nodes joined",
        ),
        (
            Status(JobState.RUNNING, progress=JobProgress(JobPhase.RANKS, 7, 8)),
            "7 of 8 ranks joined",
        ),
        (
            Status(JobState.RUNNING, progress=JobProgress(JobPhase.RANKS, 8, 8)),
            "8 of 8 ranks joined, forming the process group",
        ),
        (
            Status(JobState.RUNNING, progress=JobProgress(JobPhase.STOP, detail="hang")),
            "stopping: hang",
        ),
    ],
)
def test_phase_text(status: Status, text: str) -> None:
    assert phase_text(status) == text


def test_clock_adds_time_restarts_and_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = 100.0
    monkeypatch.setattr("time.monotonic", lambda: moment)
    clock = PhaseClock()
    running = JobProgress(JobPhase.RUNNING, 8, 8)
    assert clock.text(Status(JobState.RUNNING, progress=running)) == "running"
    assert "import" in clock.text(Status(JobState.RUNNING, progress=JobProgress(JobPhase.IMPORT)))
    moment = 103.0
    assert clock.text(Status(JobState.PENDING, "Resources")) == "queued: Resources"
    moment = 105.0
    assert clock.text(Status(JobState.PENDING, "Resources")) == "queued: Resources (2 s)"
    status = Status(JobState.RUNNING, progress=running, restarts=1)
    assert clock.text(status) == "running 0 s, restart 1"
    moment = 108.0
    assert clock.text(status) == "running 3 s, restart 1"
    clock.hear()
    moment = 228.0
    assert clock.text(status) == "running 2m 03s, no output for 2m 00s, restart 1"
    by_node_0 = replace(status, progress=replace(running, seconds=600.0))
    assert clock.text(by_node_0).startswith("running 10m 00s")
