"""What an agent says on its own stdout and stderr: whoever reads may pause or go away."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from procs import PATIENCE

TALKER = """
import sys, time
from pathlib import Path
from clusterjob.node.logs import LogReader, Timeline
from clusterjob.node.voice import Voice
directory = Path("logs/node0")
directory.mkdir(parents=True)
voice = Voice(LogReader(Path("."), node=0) if "show" in sys.argv else None)
for number in range(int(sys.argv[1])):
    (directory / "rank0.out").open("a").write(f"line {number} " + "x" * 90 + chr(10))
    begin = time.monotonic()
    voice.say(f"word {number}")
    voice.show()
    Timeline(directory).note()
    assert time.monotonic() - begin < 1, "the agent waits for a reader"
(directory / "rank0.out").open("a").write("no end of line")
Path("told").touch()
voice.finish()
voice.close()
sys.exit(7)
"""


def talk(directory: Path, *args: str, **pipes: int) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", TALKER, *args], cwd=directory, text=True, **pipes)


def test_words_and_output_are_shown_in_order_the_last_line_without_an_end_included(tmp_path: Path) -> None:
    agent = talk(tmp_path, "3", "show", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = agent.communicate(timeout=PATIENCE)
    assert agent.returncode == 7
    assert err.splitlines() == ["clusterjob: word 0", "clusterjob: word 1", "clusterjob: word 2"]
    assert [line.split(" x")[0] for line in out.splitlines()] == ["[0] line 0", "[0] line 1", "[0] line 2", "[0] no end of line"]


def test_output_that_nobody_wants_stays_in_its_files(tmp_path: Path) -> None:
    agent = talk(tmp_path, "3", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert agent.communicate(timeout=PATIENCE)[0] == ""


def test_a_reader_that_pauses_holds_nobody_up(tmp_path: Path) -> None:
    """A pipe takes 64 KiB: long before the end nothing fits into it any more."""
    agent = talk(tmp_path, "3000", "show", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    end = time.monotonic() + PATIENCE
    while not (tmp_path / "told").exists():
        assert time.monotonic() < end, "the agent waits for its reader"
        time.sleep(0.02)
    out, err = agent.communicate(timeout=PATIENCE)
    assert agent.returncode == 7
    assert len(out.splitlines()) == 3001
    assert len(err.splitlines()) == 3000


def test_a_reader_that_went_away_changes_no_exit_code(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    agent = talk(tmp_path, "5", "show", stdout=write_end, stderr=write_end)
    os.close(write_end)
    assert agent.wait(PATIENCE) == 7
