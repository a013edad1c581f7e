"""The phases that `run`, `submit --follow` and `status --watch` show, on real terminals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from commands import CLUSTERJOB, command
from launching import write_tree
from procs import TEST_TIMEOUT, wait_until
from screens import Tmux
from terminals import Terminal, show

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


@pytest.fixture
def work(tmp_path: Path, plain_python: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with the script, and a torch whose import waits."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    place = tmp_path / "work"
    write_tree(place, **{"slow/torch/__init__.py": TORCH, "train.py": SCRIPT})
    return place


def slow(work: Path, *words: str) -> list[str]:
    """Return a command line whose job has two nodes and the torch that waits."""
    path = f"PYTHONPATH={work / 'slow'}"
    return [*words, "--nodes", "2", "--env", path, "--setup", SLOW_NODE, "train.py"]


@pytest.mark.parametrize("how", ["run", "watch"])
def test_terminal_shows_each_phase(work: Path, how: str) -> None:
    argv = slow(work, *RUN)
    if how == "watch":
        argv = slow(work, *CLUSTERJOB, "submit", "--cluster", "local")
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
    assert "\x1b[?25l" not in shown or how == "watch"


def test_pipe_gets_one_plain_line_per_phase(work: Path) -> None:
    out, err = work / "out", work / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            slow(work, *RUN), cwd=work, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
        )
    for shown, file in (
        ("waiting for node 1", "node"),
        ("importing torch", "import"),
        (": running", "end"),
    ):
        wait_until(lambda shown=shown: shown in err.read_text(), TEST_TIMEOUT, shown)
        if file == "import":
            [job] = json.loads(command(work, "status", "--json").stdout)["jobs"]
            assert (job["progress"]["phase"], job["progress"]["seconds"] >= 0) == ("import", True)
        (work / file).touch()
    assert process.wait(TEST_TIMEOUT) == 0
    assert {line.partition("] ")[2] for line in out.read_text().splitlines()} == {"hello", "bye"}
    text = err.read_text()
    assert not {"\x1b", "\r"} & {*text}
    lines = text.splitlines()
    assert len(set(lines)) == len(lines)
    names = ("1 of 2 nodes joined", "importing torch", "running")
    phases = [f"clusterjob: {name}" for name in names]
    assert [line for line in lines if line in phases] == phases
    assert lines[-1].endswith("SUCCEEDED")


def test_dumb_terminal_gets_plain_lines(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    (work / "end").touch()
    code, shown = show([*RUN, "train.py"], cwd=work)
    assert (code, "\x1b" in shown) == (0, False)
    assert "clusterjob: starting the agents" in shown


@pytest.mark.parametrize(
    ("width", "columns"),
    [(64, ["id", "state", "code", "duration"]), (20, ["id", "state"])],
)
def test_narrow_table_leaves_out_columns_for_the_phase(width: int, columns: list[str]) -> None:
    row = ListRow("train-e7trvw", "RUNNING", "", "2", "hpc", "2026-01-01T00:00:00Z", "")
    assert watch_status._columns_for([row], width) == columns


def test_terminal_keeps_reason_of_restart(work: Path) -> None:
    again = "os.environ['TORCHELASTIC_RESTART_COUNT'] == '1' and not os.path.exists('end')"
    script = f"import os, time\nwhile {again}: time.sleep(0.01)\nraise SystemExit(3)\n"
    (work / "fails.py").write_text(script)
    argv = [*RUN, "--max-restarts", "1", "fails.py"]
    with Terminal(argv, cwd=work, columns=150) as terminal:
        terminal.read_until(b"clusterjob: restart 1: rank 0 (node 0, ")
        (work / "end").touch()
        assert terminal.finish() == 3
    assert terminal.shown.count(b"clusterjob: restart 1") == 1
    assert b"after 1 restart" in terminal.shown.partition(b"clusterjob: restart 1")[2]


def test_live_line_stays_below_output_on_a_narrow_terminal_and_disappears(work: Path) -> None:
    with Tmux(work, columns=100) as screen:
        screen.start(slow(work, *RUN))
        screen.wait_for("waiting for node 1")
        above = screen.screen().splitlines()[:-1]
        screen.resize(22)  # the line takes two rows until it is shown again
        wait_until(lambda: "waiting" not in screen.screen(), TEST_TIMEOUT, "a shorter line")
        screen.resize(100)
        screen.wait_for("waiting for node 1")
        assert screen.screen().splitlines()[:-1] == above
        for name in ("node", "import"):
            (work / name).touch()
        shown = screen.wait_for("running").splitlines()
        assert shown[-1].startswith("running"), "below the output"
        for width in (20, 100, 30):
            screen.resize(width)
            wait_until(lambda: screen.screen().count("running") == 1, TEST_TIMEOUT, "one line")
        (work / "end").touch()
        assert "nodes joined" not in screen.wait_for("SUCCEEDED")
        text = prompt(screen)
        assert screen.cursor()[0]
    *_, bye, verdict, last = text.splitlines()
    assert (bye.rpartition(" ")[2], last) == ("bye", "$")
    assert verdict.endswith("SUCCEEDED")


def prompt(screen: Tmux) -> str:
    """Return the screen once it ends with the prompt of the shell."""
    return wait_until(
        lambda: (now := screen.screen()).endswith("$") and now, TEST_TIMEOUT, "the prompt"
    )


@pytest.mark.parametrize("key", ["C-c", "TERM"])
def test_interrupt_or_sigterm_leaves_clean_terminal(work: Path, key: str) -> None:
    with Tmux(work) as screen:
        screen.start(["sh", "-c", 'echo $$ > pid; exec "$@"', "sh", *RUN, "train.py"])
        screen.wait_for("running")
        if key == "C-c":
            screen.press("C-c")
        else:
            os.kill(int((work / "pid").read_text()), signal.SIGTERM)
        text = prompt(screen)
        assert "running" not in text
        assert ("CANCELLED" in text) == (key == "C-c")
        assert screen.cursor()[0]
        screen.start(["stty", "-a"])
        assert " echo " in screen.wait_for("icanon")


def test_prompt_is_last_on_terminal_and_typed_text_stays(work: Path) -> None:
    (work / "train.py").write_text(
        "print('<' + input('name? '), flush=True)\nprint('>' + input('again? '), flush=True)\n"
    )
    with Terminal([*RUN, "train.py"], cwd=work, controlling=True) as terminal:
        terminal.answer(b"name? ", "a")
        terminal.read_until(b"<a")
        terminal.answer(b"again? ", "b")
        terminal.read_until(b">b")
        assert terminal.finish() == 0


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_verdict_on_terminal_is_coloured_unless_no_color(
    work: Path, monkeypatch: pytest.MonkeyPatch, no_color: str, coloured: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    (work / "train.py").write_text("raise ValueError('boom')\n")
    code, shown = show([*RUN, "train.py"], cwd=work)
    assert code == 1
    for part in ("\x1b[1m\x1b[31mFAILED\x1b[0m: rank 0", "\x1b[31m  | ValueError: boom\x1b[0m"):
        assert (part in shown) == coloured
    assert ("\x1b[3" in shown) == coloured


def test_consequences_are_folded_into_ranges() -> None:
    failures = (
        Failure(rank, rank, 3, "h", 1, None, message="boom", effect=True)
        for rank in (*range(5), *range(6, 300), None)
    )
    verdict = Verdict(JobState.FAILED, 1, reason="r", consequences=tuple(failures))
    text = "  299 ranks and 1 node failed as a consequence: 0-4, 6-299, node 3"
    assert verdict.text() == f"FAILED: r\n{text}"


def test_verdict_in_colours_has_no_other_control_characters() -> None:
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
    progress = JobProgress(JobPhase.RUNNING, 8, 8)
    running = Status(JobState.RUNNING, progress=progress)
    again = replace(running, restarts=1)
    queued = Status(JobState.PENDING, "Resources")
    for moment, status, text in (  # noqa: B007  `time.monotonic` returns it
        (100.0, running, "running"),
        (100.0, Status(JobState.RUNNING, progress=JobProgress(JobPhase.IMPORT)), "importing torch"),
        (103.0, queued, "queued: Resources"),
        (105.0, queued, "queued: Resources (2 s)"),
        (105.0, again, "running 0 s, restart 1"),
        (108.0, again, "running 3 s, restart 1"),
    ):
        assert clock.text(status) == text
    clock.hear()
    moment = 228.0
    assert clock.text(again) == "running 2m 03s, no output for 2m 00s, restart 1"
    by_node_0 = replace(again, progress=replace(progress, seconds=600.0))
    assert clock.text(by_node_0).startswith("running 10m 00s")
