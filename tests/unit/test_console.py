"""The agent's own stdout and stderr, with readers that pause or disappear."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import finish, start
from procs import TEST_TIMEOUT

from clusterjob.backends.batch_command import log_stream

CONSOLE_SCRIPT = """
import sys, time
from pathlib import Path
from clusterjob.node.logs.log_files import Timeline
from clusterjob.node.logs.log_files import LogReader
from clusterjob.node.verdict import JobState, Verdict
from clusterjob.node.logs.console import Console
directory = Path("logs/node0")
directory.mkdir(parents=True)
reader = LogReader(Path("."), node=0) if "show" in sys.argv else None
console = Console(reader, numbered="numbered" in sys.argv)
for number in range(int(sys.argv[1])):
    (directory / "rank0.out").open("a").write(f"line {number} " + "x" * 90 + chr(10))
    begin = time.monotonic()
    console.print(f"word {number}")
    console.show()
    Timeline(directory).note()
    assert time.monotonic() - begin < 10, "the agent waits for a reader"
(directory / "rank0.out").open("a").write("no end of line")
Path("told").touch()
(directory / "rank1.err").write_bytes(b"\\xff snow \\xe2\\x98\\x83")
console.finish()
console.print("over\\nand out")
console.print_verdict(Verdict(JobState.SUCCEEDED, 0))
console.close()
sys.exit(7)
"""


def start_console(directory: Path, *args: str, **pipes: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CONSOLE_SCRIPT, *args], cwd=directory, text=True, **pipes
    )


def test_messages_and_output_keep_order_and_unterminated_last_line(
    tmp_path: Path,
) -> None:
    agent = start_console(tmp_path, "3", "show", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = agent.communicate(timeout=TEST_TIMEOUT)
    assert agent.returncode == 7
    expected_err = [
        "clusterjob: word 0",
        "clusterjob: word 1",
        "clusterjob: word 2",
        "[1] \ufffd snow \u2603",
        "clusterjob: over",
        "and out",
    ]
    assert err.splitlines() == expected_err
    assert [line.split(" x")[0] for line in out.splitlines()] == [
        "[0] line 0",
        "[0] line 1",
        "[0] line 2",
        "[0] no end of line",
    ]


def test_equal_lines_of_ranks_in_one_poll_are_folded(tmp_path: Path) -> None:
    program = """
from pathlib import Path
from clusterjob.node.logs.log_files import Timeline
from clusterjob.node.logs.log_files import LogReader
from clusterjob.node.logs.console import Console
directory = Path("logs/node0")
directory.mkdir(parents=True)
for rank in range(4):
    (directory / f"rank{rank}.out").write_text("ready\\n")
Timeline(directory).note()
console = Console(LogReader(Path("."), node=0))
console.show()
console.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TEST_TIMEOUT,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0-3] ready\n", "")


def test_output_without_show_is_not_printed(tmp_path: Path) -> None:
    agent = start_console(tmp_path, "3", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert agent.communicate(timeout=TEST_TIMEOUT)[0] == ""


def test_paused_reader_does_not_block_agent(tmp_path: Path) -> None:
    """A pipe holds 64 KiB, so it is full long before the last line."""
    agent = start_console(tmp_path, "3000", "show", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    end = time.monotonic() + TEST_TIMEOUT
    while not (tmp_path / "told").exists():
        assert time.monotonic() < end, "the agent waits for its reader"
        time.sleep(0.02)
    out, err = agent.communicate(timeout=TEST_TIMEOUT)
    assert agent.returncode == 7
    assert len(out.splitlines()) == 3001
    assert len(err.splitlines()) == 3003


@pytest.mark.parametrize("locale", ["C.UTF-8", "POSIX"])
def test_numbered_lines_go_to_stdout_with_verdict_last(tmp_path: Path, locale: str) -> None:
    extra_env = {
        "LC_ALL": locale,
        "PYTHONIOENCODING": "latin-1",
    }  # as set in some container images; the reader expects UTF-8
    result = finish(
        start([sys.executable, "-c", CONSOLE_SCRIPT, "3", "show", "numbered"], tmp_path, extra_env)
    )
    assert (result.code, result.err) == (7, "")
    lines = [log_stream.parse_line(line) for line in result.out.splitlines()]
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
    assert abs(stamps[0] - time.time()) < TEST_TIMEOUT


def test_closed_reader_does_not_change_exit_code(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    agent = start_console(tmp_path, "5", "show", stdout=write_end, stderr=write_end)
    os.close(write_end)
    assert agent.wait(TEST_TIMEOUT) == 7
