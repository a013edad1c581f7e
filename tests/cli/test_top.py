"""The live screen of `top` in a real terminal: real jobs, 256 ranks, keys, a clean end."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import command
from procs import TEST_TIMEOUT, wait_until
from screens import Screen, require_tmux
from terminals import Terminal
from written_job import WrittenJob

from clusterjob.cli import tables

SIZES = [(80, 24), (200, 60)]
SIZE_CASES = [
    pytest.param(SIZES[0], id="80x24"),
    pytest.param(SIZES[1], id="200x60", marks=pytest.mark.slow),
]
TOP = f"{sys.executable} -m clusterjob top"
LOOPING = """
    import os, time

    def train_one_epoch():
        step = 0
        while True:
            step += 1
            print(f"epoch 1 step {step} of rank {os.environ['RANK']}", flush=True)
            time.sleep(0.5)

    train_one_epoch()
"""


def state(job_id: str) -> str:
    [job] = json.loads(command(Path(), "status", job_id, "--json").stdout)["jobs"]
    return job["state"]


@pytest.fixture
def real_job(tmp_path: Path) -> Iterator[str]:
    """A job of two ranks that runs until it is cancelled."""
    require_tmux()
    (tmp_path / "train.py").write_text(textwrap.dedent(LOOPING))
    words = ("--cluster", "local", "--nproc-per-node", "2", "train.py")
    job_id = command(tmp_path, "submit", *words).stdout.strip()
    yield job_id
    command(tmp_path, "cancel", job_id)
    command(tmp_path, "wait", job_id, code=143)


def window(size: tuple[int, int], directory: Path, line: str = TOP) -> Screen:
    return Screen(line, columns=size[0], rows=size[1], directory=directory)


def assert_fits(screen: Screen) -> None:
    """Check that no line is wrapped: each table has its header, and the last line the keys."""
    wait_until(lambda: screen.lines[screen.rows - 1].startswith("q Quit"), TEST_TIMEOUT, "the keys")
    lines = screen.lines
    assert lines[0].startswith("clusterjob top"), screen.text
    assert all(tables.width_of(line) <= screen.columns for line in lines)
    heads = [line for line in lines if re.match(r" (JOB|NODE|RANK)\b", line)]
    assert len(heads) == 3, screen.text


@pytest.mark.parametrize("size", SIZE_CASES)
def test_top_shows_two_real_ranks_and_obeys_keys(
    size: tuple[int, int], real_job: str, tmp_path: Path
) -> None:
    with window(size, tmp_path) as screen:
        screen.wait_for_all(real_job, "RUNNING", "of rank 0", "of rank 1", "SILENT", "2 ranks")
        # The first metrics come after 5 s: the memory of rank 1.
        row = r"\n.? +1 .* \d+(\.\d)?[MG] .* of rank 1"
        wait_until(lambda: re.search(row, _ranks(screen)), TEST_TIMEOUT, row)
        assert "CPU TREND" in _ranks(screen)
        assert_fits(screen)

        screen.press_for("?", "Keys of clusterjob top", "stacks of the row's processes")
        screen.press("Escape")
        screen.wait_without("Keys of clusterjob top")

        screen.press("Enter")  # from the job to its ranks
        screen.press_for("Down", "▶   1")
        text = screen.press_for("l", f"log of rank 1 of {real_job}", "epoch 1 step")
        assert "of rank 0" not in text
        newest = max(map(int, re.findall(r"step (\d+) of rank 1", text)))
        screen.wait_for_all(f"step {newest + 2} of rank 1")  # it follows
        screen.press_for("q", "RANK▲")

        screen.press_for("t", f"stacks of rank 1 of {real_job}", "train_one_epoch", "train.py")
        screen.press_for("q", "RANK▲")

        screen.press("/")
        screen.press("rank 0")
        wait_until(lambda: "of rank 1" not in _ranks(screen), TEST_TIMEOUT)
        screen.press("Escape")
        wait_until(lambda: "of rank 1" in _ranks(screen), TEST_TIMEOUT)

        screen.press_for("r", "RANK▼")
        screen.press_for("c", f"Cancel job {real_job}")
        screen.press("n")
        screen.wait_without("Cancel job")
        assert state(real_job) == "RUNNING"
        screen.press_for("c", f"Cancel job {real_job}")
        screen.press_for("y", "CANCELLED")
        screen.press_for("q", "exit code 0")
        screen.assert_clean()


def _ranks(screen: Screen) -> str:
    """Return the table of ranks."""
    return screen.text.partition("RANK")[2]


@pytest.fixture
def large() -> WrittenJob:
    """A job of 32 nodes with 8 ranks each, whose last hour is in its files."""
    require_tmux()
    job = WrittenJob("large-222222", nodes=32, ranks=8, gpus=8)
    job.past(60)
    job.grow()
    return job


@pytest.mark.parametrize("size", SIZE_CASES)
def test_top_shows_256_ranks_at_little_cost(
    size: tuple[int, int], large: WrittenJob, tmp_path: Path
) -> None:
    with window(size, tmp_path) as screen:
        screen.wait_for_all("large-222222", "RUNNING", "256 ranks: running", "epoch 3 step 61")
        assert_fits(screen)
        assert "GPU TREND" in screen.text
        assert any(bar in screen.text for bar in "▃▄▅▆▇█")
        screen.press("Tab", "Tab", "End")
        screen.wait_for_all("▶ 255")
        # Sort by CPU, the largest value first, then the smallest first: rank 3 of 7 is idle.
        wait_until(lambda: _sorted_by(screen, "CPU%▼"), TEST_TIMEOUT)
        screen.press("r", "Home")
        wait_until(lambda: re.search(r"\n▶ +\d+ .* running +2 ", screen.text), TEST_TIMEOUT)
        pid = screen.command_pid()
        begin, ticks = time.monotonic(), _cpu(pid)
        for _ in range(3):
            large.grow()
            time.sleep(1)
        share = (_cpu(pid) - ticks) / (time.monotonic() - begin)
        assert share < 0.15, f"{share:.1%} of a core"
        screen.press_for("q", "exit code 0")


def _sorted_by(screen: Screen, head: str) -> bool:
    if head in screen.text:
        return True
    screen.press("s")
    time.sleep(0.3)
    return head in screen.text


def _cpu(pid: int) -> float:
    """Return the CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_top_follows_the_size_of_the_terminal_and_the_mouse(
    large: WrittenJob, tmp_path: Path
) -> None:
    with window((200, 60), tmp_path) as screen:
        screen.wait_for_all("256 ranks", "HOST", "RECV/s")
        screen.resize(80, 24)
        screen.wait_without("RECV/s")
        assert_fits(screen)
        screen.resize(30, 8)  # too small for most, but no traceback
        screen.wait_without("LAST LINE")
        screen.resize(120, 40)
        assert_fits(screen)
        screen.wait_for_all("LAST LINE", "256 ranks")
        head = next(row for row, line in enumerate(screen.lines) if line.startswith(" RANK"))
        screen.click(8, head + 3)
        wait_until(lambda: screen.lines[head + 3].startswith("▶"), TEST_TIMEOUT)
        screen.click(screen.lines[head].index("MEM"), head)
        screen.wait_for_all("MEM▼")
        screen.click(screen.lines[39].index("Help"), 39)
        screen.wait_for_all("Keys of clusterjob top")


@pytest.mark.parametrize(
    ("how", "variables"), [("C-c", ""), ("SIGTERM", "NO_COLOR=1 "), ("SIGHUP", "")]
)
def test_top_obeys_no_color_and_leaves_a_clean_terminal(
    how: str, variables: str, tmp_path: Path
) -> None:
    WrittenJob("small-222222").grow()
    with window((80, 24), tmp_path, variables + TOP) as screen:
        screen.wait_for_all("small-222222", "RUNNING", "2 ranks")
        assert screen.value("alternate_on") == "1"
        assert bool(screen.colours) != bool(variables)
        if how == "C-c":
            screen.press_for("C-c", "exit code 0")
        else:
            number = getattr(signal, how)
            os.kill(screen.command_pid(), number)
            screen.wait_for_all(f"exit code {128 + number}")
        screen.assert_clean()


def test_top_reports_its_own_crash_in_one_line(tmp_path: Path) -> None:
    WrittenJob("small-222222").grow()
    program = tmp_path / "crash.py"
    program.write_text(
        "from clusterjob.cli import main, top_table\n"
        "def crash(self, y): raise RuntimeError('no \\x1b[31m line')\n"
        "top_table.LiveTable.render_line = crash\n"
        "raise SystemExit(main(['top']))\n"
    )
    with window((80, 24), tmp_path, f"{sys.executable} {program}") as screen:
        text = screen.wait_for_all("exit code 1")
        assert "clusterjob: error: the screen failed: RuntimeError: no  line" in text
        assert "Traceback" not in text
        screen.assert_clean()


def test_top_without_textual_says_what_to_install(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['textual'] = None; from clusterjob.cli import main;"
        " sys.exit(main(['top']))"
    )
    with Terminal([sys.executable, "-c", program], controlling=True) as terminal:
        terminal.read_until(b"-m pip install textual; `clusterjob status --watch`")
        assert terminal.process.wait(TEST_TIMEOUT) == 2
