"""What an agent says on its own stdout and stderr: whoever reads may pause or go away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import finish, start
from procs import PATIENCE

from clusterjob.node.logs import log_protocol

TALKER = """
import sys, time
from pathlib import Path
from clusterjob.node.logs.log_files import LogReader, Timeline
from clusterjob.node.verdict import JobState, Verdict
from clusterjob.node.logs.console import Voice
directory = Path("logs/node0")
directory.mkdir(parents=True)
voice = Voice(LogReader(Path("."), node=0) if "show" in sys.argv else None, numbered="numbered" in sys.argv)
for number in range(int(sys.argv[1])):
    (directory / "rank0.out").open("a").write(f"line {number} " + "x" * 90 + chr(10))
    begin = time.monotonic()
    voice.say(f"word {number}")
    voice.show()
    Timeline(directory).note()
    assert time.monotonic() - begin < 10, "the agent waits for a reader"
(directory / "rank0.out").open("a").write("no end of line")
Path("told").touch()
(directory / "rank1.err").write_bytes(b"\\xff snow \\xe2\\x98\\x83")
voice.finish()
voice.say("over\\nand out")
voice.tell(Verdict(JobState.SUCCEEDED, 0))
voice.close()
sys.exit(7)
"""


def talk(directory: Path, *args: str, **pipes: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", TALKER, *args], cwd=directory, text=True, **pipes
    )


def test_words_and_output_are_shown_in_order_the_last_line_without_an_end_included(
    tmp_path: Path,
) -> None:
    agent = talk(tmp_path, "3", "show", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = agent.communicate(timeout=PATIENCE)
    assert agent.returncode == 7
    words = [
        "clusterjob: word 0",
        "clusterjob: word 1",
        "clusterjob: word 2",
        "[1] \ufffd snow \u2603",
        "clusterjob: over",
        "and out",
    ]
    assert err.splitlines() == words
    assert [line.split(" x")[0] for line in out.splitlines()] == [
        "[0] line 0",
        "[0] line 1",
        "[0] line 2",
        "[0] no end of line",
    ]


def test_lines_that_ranks_write_alike_in_one_look_are_one(tmp_path: Path) -> None:
    program = """
from pathlib import Path
from clusterjob.node.logs.log_files import LogReader, Timeline
from clusterjob.node.logs.console import Voice
directory = Path("logs/node0")
directory.mkdir(parents=True)
for rank in range(4):
    (directory / f"rank{rank}.out").write_text("ready\\n")
Timeline(directory).note()
voice = Voice(LogReader(Path("."), node=0))
voice.show()
voice.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0-3] ready\n", "")


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
    assert len(err.splitlines()) == 3003


@pytest.mark.parametrize("locale", ["C.UTF-8", "POSIX"])
def test_numbered_lines_all_go_to_stdout_the_verdict_last(tmp_path: Path, locale: str) -> None:
    extra = {
        "LC_ALL": locale,
        "PYTHONIOENCODING": "latin-1",
    }  # an image's; a reader takes it for UTF-8
    ran = finish(start([sys.executable, "-c", TALKER, "3", "show", "numbered"], tmp_path, extra))
    assert (ran.code, ran.err) == (7, "")
    lines = [log_protocol.parse(line) for line in ran.out.splitlines()]
    assert [line and line.number for line in lines] == list(range(1, len(lines) + 1))
    found = [(line.kind, line.label, line.text.partition(" x")[0]) for line in lines if line]
    assert [text for kind, _, text in found if kind == "agent"] == [
        "word 0",
        "word 1",
        "word 2",
        "over",
        "and out",
    ]
    assert [text for kind, _, text in found if kind == "out"] == [
        "line 0",
        "line 1",
        "line 2",
        "no end of line",
    ]
    assert ("err", "1", "\ufffd snow \u2603") in found
    assert found[-1][0] == "verdict"
    assert json.loads(found[-1][2])["state"] == "SUCCEEDED"
    assert lines[0] is not None
    stamps = [line.seconds for line in lines if line and line.seconds]
    assert stamps == sorted(stamps)
    assert abs(stamps[0] - time.time()) < PATIENCE


def test_a_reader_that_went_away_changes_no_exit_code(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    agent = talk(tmp_path, "5", "show", stdout=write_end, stderr=write_end)
    os.close(write_end)
    assert agent.wait(PATIENCE) == 7
