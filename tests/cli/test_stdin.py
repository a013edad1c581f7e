"""Rank 0 reads the stdin of run and launch, also a terminal; other ranks get empty stdin."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from procs import TEST_TIMEOUT, MakeJob, wait_until
from terminals import Terminal

pytestmark = pytest.mark.usefixtures("plain_python")

READER = """
    import os, sys
    print(os.environ["RANK"], repr(sys.stdin.readline()), sys.stdin.isatty(), flush=True)
"""
DEBUGGED = """
    import os
    secret = 41
    print("up", flush=True)
    if os.environ["RANK"] == "0":
        breakpoint()
    print("went on with", secret, flush=True)
"""


@contextlib.contextmanager
def in_terminal(argv: list[str], directory: Path) -> Iterator[Terminal]:
    """Run a command in the foreground of its own terminal; its output goes to files."""
    with (
        (directory / "out").open("wb") as out,
        (directory / "err").open("wb") as err,
        Terminal(argv, cwd=directory, controlling=True, stdout=out, stderr=err) as terminal,
    ):
        yield terminal


RUN = [sys.executable, "-m", "clusterjob", "run"]
LAUNCH = [sys.executable, "-S", "-m", "clusterjob.node"]
COMMANDS = pytest.mark.parametrize("command", [RUN, LAUNCH], ids=["run", "launch"])
# Two ranks with each start and each command. A forked worker inherits the terminal from the
# forkserver; `run` passes the terminal to the agent.
TWO_RANKS = pytest.mark.parametrize(
    "command",
    [
        [*RUN, "--nodes", "2", "--start", "fork"],
        [*LAUNCH, "--nproc-per-node", "2", "--start", "fork"],
        [*LAUNCH, "--nproc-per-node", "2", "--start", "exec"],
    ],
    ids=["run-fork", "launch-fork", "launch-exec"],
)


@TWO_RANKS
def test_only_rank_0_reads_terminal(make_job: MakeJob, tmp_path: Path, command: list[str]) -> None:
    script = make_job().script(READER)
    with in_terminal([*command, script], tmp_path) as terminal:
        terminal.type(b"typed\n")
        assert terminal.process.wait(TEST_TIMEOUT) == 0, (tmp_path / "err").read_text()
    assert sorted((tmp_path / "out").read_text().splitlines()) == [
        "[0] 0 'typed\\n' True",
        "[1] 1 '' False",
    ]


@COMMANDS
def test_breakpoint_of_rank_0_reads_terminal(
    make_job: MakeJob, tmp_path: Path, command: list[str]
) -> None:
    script = make_job().script(DEBUGGED)
    with in_terminal([*command, script], tmp_path) as terminal:
        terminal.type(b"secret += 1\nc\n")
        assert terminal.process.wait(TEST_TIMEOUT) == 0, (tmp_path / "err").read_text()
    assert "went on with 42" in (tmp_path / "out").read_text()


@COMMANDS
def test_ctrl_c_at_a_prompt_interrupts_all_ranks(
    make_job: MakeJob, tmp_path: Path, command: list[str]
) -> None:
    script = make_job().script("print('up', flush=True)\ninput('name? ')")
    with in_terminal([*command, script], tmp_path) as terminal:
        # the output is shown, so the command follows the job
        wait_until(lambda: "up" in (tmp_path / "out").read_text(), TEST_TIMEOUT)
        terminal.type(b"\x03")
        code = 130 if command == RUN else 143
        assert terminal.process.wait(TEST_TIMEOUT) == code, (tmp_path / "err").read_text()
    assert "KeyboardInterrupt" in (tmp_path / "err").read_text()


def test_rank_0_reads_pipe_but_detached_job_has_empty_stdin(
    make_job: MakeJob, tmp_path: Path
) -> None:
    script = make_job().script(READER)
    for words, shown in (
        (["run"], "0 'piped\\n' False"),
        (["submit", "--follow"], "0 '' False"),
    ):
        done = subprocess.run(
            [*RUN[:-1], *words, script], input="piped\n", capture_output=True, text=True,
            cwd=tmp_path, check=False,
        )  # fmt: skip
        assert shown in done.stdout.splitlines(), done.stderr


def test_background_run_does_not_read_terminal(make_job: MakeJob, tmp_path: Path) -> None:
    script = make_job().script(READER)
    shell = f"set -m; {sys.executable} -m clusterjob run {script} & wait $!"
    with in_terminal(["/bin/bash", "-c", shell], tmp_path) as terminal:
        terminal.type(b"for the shell\n")
        wait_until(lambda: terminal.process.poll() is not None, TEST_TIMEOUT)
    assert (tmp_path / "out").read_text() == "0 '' False\n"


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ([*RUN, "--nodes", "2", "--nproc-per-node", "2"], "-"),
        ([*LAUNCH, "--nproc-per-node", "4"], "/dev/stdin"),
    ],
    ids=["run", "launch"],
)
def test_script_on_stdin_runs_on_every_rank(
    tmp_path: Path, command: list[str], program: str
) -> None:
    (tmp_path / "beside.py").write_text("here = True")
    script = """
from __future__ import annotations
import os, sys, beside
print(os.environ["RANK"], sys.argv, __name__, repr(sys.stdin.read()), flush=True)
"""
    ended = subprocess.run(
        [*command, program, "--lr", "1"],
        input=script,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert sorted(ended.stdout.splitlines()) == [
        f"[{rank}] {rank} ['-', '--lr', '1'] __main__ ''" for rank in range(4)
    ], ended.stderr
    if "run" in command:
        for words in (["rerun"], ["wait", "@"]):
            subprocess.run([*RUN[:-1], *words], check=True, cwd=tmp_path, stdin=subprocess.DEVNULL)


@COMMANDS
def test_empty_script_on_stdin_is_refused(tmp_path: Path, command: list[str]) -> None:
    ended = subprocess.run(
        [*command, "-"], input="", capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    assert "the script '-' is empty, or longer than 16 MiB" in ended.stderr
