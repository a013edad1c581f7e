"""End-to-end tests of the command line: stdout, stderr and exit codes of each command.

Each command runs in its own process, with real jobs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import procs
import pytest
from commands import CLUSTERJOB, PACKAGE
from launching import finish
from preloaded import Preloaded
from procs import TEST_TIMEOUT, kill_all, own_processes, wait_until

from clusterjob.cli import main as command_line

HOST = socket.gethostname()
END_TIMEOUT = 15.0  # seconds; much longer than a job needs to end, because the machine may be busy
RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z")

# Each rank creates a file, then sleeps for ever.
SLEEPER = """
    import os, pathlib, time
    print("line of", os.environ["RANK"], flush=True)
    pathlib.Path(f"up{os.environ['RANK']}").touch()
    time.sleep(1000)
"""
# Each rank creates a file, then waits for the file `leave`.
WAITER = """
    import os, pathlib, time
    print("line of", os.environ["RANK"], flush=True)
    pathlib.Path(f"up{os.environ['RANK']}").touch()
    while not os.path.exists("leave"):
        time.sleep(0.01)
    print("left", os.environ["RANK"], flush=True)
    pathlib.Path(f"left{os.environ['RANK']}").touch()
    while not all(os.path.exists(f"left{rank}") for rank in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.01)  # a rank that fails earlier would stop the others
"""


class Terminal:
    """A user's shell in a directory.

    The interpreter for jobs starts fast because it has no torch to import.
    """

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch, commands: Preloaded) -> None:
        self.directory = directory
        self._commands = commands
        python = directory.parent / "python"
        python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')
        python.chmod(0o755)
        patch.setenv("CLUSTERJOB_PYTHON", str(python))
        self.home = Path(os.environ["CLUSTERJOB_HOME"])
        self.running: list[subprocess.Popen[str]] = []

    def path(self, name: str) -> Path:
        return self.directory / name

    def script(self, text: str, name: str = "script.py") -> str:
        self.path(name).write_text(textwrap.dedent(text))
        return name

    def __call__(
        self,
        *args: str,
        code: int = 0,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command; fail the test unless it exits with the given code."""
        argv = ["-m", "clusterjob", *args]
        done = finish(self._commands.start_program(argv, cwd or self.directory, os.environ))
        assert done.code == code, f"exit code {done.code}\n{done.out}\n{done.err}"
        assert PACKAGE not in done.err, f"a traceback of ours\n{done.err}"
        return subprocess.CompletedProcess(argv, done.code, done.out, done.err)

    def start(self, *args: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command; `output` returns what it has written."""
        number = len(self.running)
        with (
            self._output(number, "out").open("w") as out,
            self._output(number, "err").open("w") as err,
        ):
            options = {
                "cwd": self.directory,
                "stdin": subprocess.DEVNULL,
                "stdout": out,
                "stderr": err,
                **options,
            }
            self.running.append(subprocess.Popen([*CLUSTERJOB, *args], text=True, **options))
        return self.running[-1]

    def output(self, process: subprocess.Popen[str]) -> tuple[str, str]:
        """Return what a started command has written to stdout and to stderr so far."""
        number = self.running.index(process)
        return self._output(number, "out").read_text(), self._output(number, "err").read_text()

    def _output(self, number: int, stream: str) -> Path:
        return self.directory.parent / f"command{number}.{stream}"

    def submit(self, text: str, *options: str, args: tuple[str, ...] = ()) -> str:
        return self("submit", *options, self.script(text), *args).stdout.strip()

    def job(self, job_id: str) -> dict[str, Any]:
        [job] = json.loads(self("status", "--json", job_id).stdout)["jobs"]
        return job

    def only_job(self) -> dict[str, Any]:
        """Return the only job in the list; fail if there are several."""
        [job] = json.loads(self("list", "--json").stdout)["jobs"]
        return job

    def wait_for(self, *names: str) -> None:
        wait_until(
            lambda: all(self.path(name).exists() for name in names),
            TEST_TIMEOUT,
            f"the files {names}",
        )

    def leftover_files(self) -> list[str]:
        """Return all files that jobs have left; directories do not count."""
        return [str(path) for path in self.home.rglob("*") if not path.is_dir()]


def wait_for_no_processes(timeout: float = END_TIMEOUT) -> float:
    return procs.wait_for_no_processes(timeout)


@pytest.fixture
def terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preloaded_commands: Preloaded
) -> Iterator[Terminal]:
    directory = tmp_path / "work"
    directory.mkdir()
    user = Terminal(directory, monkeypatch, preloaded_commands)
    yield user
    try:
        wait_for_no_processes()
    finally:
        kill_all(own_processes())
        for process in user.running:
            process.wait(TEST_TIMEOUT)


# -- starting jobs ---------------------------------------------------------------------------------


def test_submit_prints_only_job_id_and_detaches(terminal: Terminal) -> None:
    begin = time.monotonic()
    done = terminal("submit", "--nodes", "2", terminal.script(WAITER))
    print(f"submit took {time.monotonic() - begin:.2f} s")
    assert re.fullmatch(r"script-[a-z2-9]{6}\n", done.stdout)
    assert done.stderr == ""
    job_id = done.stdout.strip()
    terminal.wait_for("up0", "up1")
    assert terminal.job(job_id)["state"] == "RUNNING"
    terminal.path("leave").touch()
    done = terminal("wait", job_id)
    assert done.stdout == ""
    assert done.stderr == f"clusterjob: job {job_id} SUCCEEDED\n"
    wait_for_no_processes()


def test_submit_returns_before_job_starts(terminal: Terminal) -> None:
    job_id = terminal.submit("", "--setup", "while [ ! -e go ]; do sleep 0.02; done")
    assert terminal.job(job_id)["state"] == "PENDING"
    assert terminal.job(job_id)["started_at"] is None
    terminal.path("go").touch()
    terminal("wait", job_id)


def test_submit_json_describes_job(terminal: Terminal) -> None:
    done = terminal("submit", "--json", "--name", "a name", terminal.script(""))
    result = json.loads(done.stdout)
    assert result.keys() >= {"schema", "id", "cluster", "backend", "job_dir"}
    assert (result["schema"], result["cluster"], result["backend"]) == (1, "local", "local")
    assert result["id"].startswith("a-name-")
    assert Path(result["job_dir"]).is_dir()
    assert done.stderr == ""
    terminal("wait", result["id"])


@pytest.mark.parametrize("code", [0, 1, 3, 255])
def test_run_exits_with_exit_code_of_job(terminal: Terminal, code: int) -> None:
    script = terminal.script(
        f"import sys; print('to stdout'); print('to stderr', file=sys.stderr); sys.exit({code})"
    )
    done = terminal("run", script, code=code)
    assert done.stdout == "to stdout\n", (
        "the output of one worker has no labels, so that it can be piped on"
    )
    assert "\nto stderr\nclusterjob: " in done.stderr
    state = "FAILED" if code else "SUCCEEDED"
    assert re.search(rf"^clusterjob: job script-\w+ {state}", done.stderr, re.MULTILINE)
    assert ("  logs: " in done.stderr) == bool(code)
    assert terminal.only_job()["exit_code"] == code
    wait_for_no_processes()


def test_run_with_several_workers_labels_output_with_ranks(terminal: Terminal) -> None:
    script = terminal.script("""
        import os, sys
        print("the same")
        print("own", os.environ["RANK"])
        print("warning", file=sys.stderr)
    """)
    done = terminal("run", "--nodes", "2", "--nproc-per-node", "2", script)
    labels = [re.fullmatch(r"\[([\d,-]+)\] (.*)", line) for line in done.stdout.splitlines()]
    assert all(labels)
    labelled = [(match[1], match[2]) for match in labels if match]
    assert sorted(text for label, text in labelled if text.startswith("own")) == [
        f"own {rank}" for rank in range(4)
    ]
    assert all(
        label == text.removeprefix("own ") for label, text in labelled if text.startswith("own")
    )
    assert {text for _, text in labelled} == {"the same", *(f"own {rank}" for rank in range(4))}
    *messages, last = done.stderr.splitlines()
    warnings = [line for line in messages if not line.startswith("clusterjob: ")]
    assert {line.partition("] ")[2] for line in warnings} == {"warning"}
    assert re.fullmatch(r"clusterjob: job script-\w+ SUCCEEDED", last)


@pytest.mark.parametrize(
    ("statement", "code", "how"),
    [
        pytest.param("raise ValueError('boom')", 1, "ValueError: boom", id="raise"),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL", id="kill"),
    ],
)
def test_run_reports_failed_rank_and_cause(
    terminal: Terminal, statement: str, code: int, how: str
) -> None:
    script = terminal.script(f"""
        import os, signal, sys, time
        if os.environ["RANK"] == "1":
            print("last words", file=sys.stderr, flush=True)
            {statement}
        time.sleep(1000)
    """)
    done = terminal("run", "--nodes", "2", script, code=code)
    verdict = re.search(r"^clusterjob: job \S+ FAILED: (.*)$", done.stderr, re.MULTILINE)
    assert verdict
    assert verdict[1].startswith(f"rank 1 (node 1, local rank 0, host {HOST}): ")
    assert how in verdict[1]
    assert "\n  | last words\n" in done.stderr
    assert done.stdout == ""
    wait_for_no_processes()
    failure = terminal.only_job()["failure"]
    assert failure.keys() >= {
        "rank",
        "local_rank",
        "node_rank",
        "host",
        "exit_code",
        "signal",
        "message",
    }
    assert (failure["rank"], failure["local_rank"], failure["node_rank"], failure["host"]) == (
        1,
        0,
        1,
        HOST,
    )
    assert (failure["exit_code"], failure["signal"]) == (code, "SIGKILL" if code == 137 else None)


def test_submit_follow_exits_with_exit_code_of_job(terminal: Terminal) -> None:
    done = terminal(
        "submit", "--follow", terminal.script("print('hello'); raise SystemExit(4)"), code=4
    )
    job_id, *rest = done.stdout.splitlines()
    assert job_id == terminal.only_job()["id"]
    assert rest == ["hello"]
    assert "FAILED" in done.stderr


def test_run_accepts_module_and_command(terminal: Terminal) -> None:
    terminal.path("package").mkdir()
    terminal.path("package/__init__.py").touch()
    terminal.script("import sys; print(__name__, sys.argv[1:])", "package/train.py")
    assert (
        terminal("run", "-m", "package.train", "--nodes", "7", "-m", "x").stdout
        == "__main__ ['--nodes', '7', '-m', 'x']\n"
    )
    command = ["bash", "-c", 'echo "$0" "$1" $RANK', "--help", "a  b"]
    assert terminal("run", "--name", "shell", "--", *command).stdout == "--help a  b 0\n"


def test_arguments_after_script_are_passed_to_script(terminal: Terminal) -> None:
    options = [
        "--nodes",
        "7",
        "-h",
        "--help",
        "--json",
        "-v",
        "--version",
        "--",
        "-m",
        "x",
        "",
        "a b",
        "--dry-run",
        "☃",
    ]
    assert (
        terminal("run", terminal.script("import sys; print(sys.argv[1:])"), *options).stdout
        == f"{options}\n"
    )
    assert (
        terminal("run", "--nodes=1", "--name", "-x", "script.py", "--nodes=9").stdout
        == "['--nodes=9']\n"
    )


def test_script_named_like_option_runs(terminal: Terminal) -> None:
    terminal.script("print('hello')", "--nodes.py")
    assert terminal("run", "./--nodes.py").stdout == "hello\n"


def test_workers_get_variables_of_command_line_and_file(terminal: Terminal) -> None:
    terminal.path("clusterjob.toml").write_text(
        '[defaults]\nenv = {A = "file", B = "file"}\nsetup = ["export C=file"]\n'
    )
    terminal("trust", "--yes")
    script = terminal.script("import os; print(*(os.environ[name] for name in 'ABCD'))")
    assert (
        terminal("run", "--env", "B=x=y z", "--env", "D=", "--setup", "C=$C,flag", script).stdout
        == "file x=y z file,flag \n"
    )


def test_run_without_gpus_uses_cpu_and_prints_one_line(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    script = terminal.script("import os; print(os.environ['CUDA_VISIBLE_DEVICES'] or 'none')")
    done = terminal("run", "--gpus-per-node", "1", script)
    assert done.stdout == "none\n"
    assert len([line for line in done.stderr.splitlines() if "GPUs" in line and "CPU" in line]) == 1
    done = terminal("run", "--gpus-per-node", "1", "--require-gpus", script, code=2)
    assert (done.stdout, len(done.stderr.splitlines())) == ("", 2)
    assert "0 of the 1 GPUs" in done.stderr
    monkeypatch.setenv("CLUSTERJOB_REQUIRE_GPUS", "1")
    terminal("run", "--gpus-per-node", "1", script, code=2)
    terminal("run", "--gpus-per-node", "1", "--no-require-gpus", script)


# -- the plan --------------------------------------------------------------------------------------


def test_render_prints_plan_and_writes_no_file(terminal: Terminal) -> None:
    options = [
        "--nodes",
        "2",
        "--env",
        "A=it's",
        "--setup",
        "module load cuda",
        terminal.script(""),
        "--flag",
    ]
    texts = []
    for command in (["render"], ["submit", "--dry-run"]):
        done = terminal(*command, *options)
        assert done.stderr == ""
        texts.append(re.sub(r"script-[a-z2-9]{6}", "ID", done.stdout))
    assert texts[0] == texts[1]
    assert f"### {terminal.home}/jobs/ID/node.sh (0700)\n#!/usr/bin/env bash\n" in texts[0]
    assert "export A='it'\"'\"'s'" in texts[0]
    assert "module load cuda" in texts[0]
    assert texts[0].splitlines()[-2:] == [
        f"CLUSTERJOB_NODE_RANK={rank} bash {terminal.home}/jobs/ID/node.sh" for rank in (0, 1)
    ]
    assert not terminal.home.exists()


@pytest.mark.parametrize("command", [["render", "--json"], ["submit", "--dry-run", "--json"]])
def test_plan_in_json_has_files_and_commands(terminal: Terminal, command: list[str]) -> None:
    plan = json.loads(terminal(*command, terminal.script("")).stdout)
    assert plan.keys() >= {"schema", "job_id", "backend", "job_dir", "files", "commands", "notes"}
    assert plan["schema"] == 1
    assert [Path(file["path"]).name for file in plan["files"]] == [
        "spec.json",
        "clusterjob-node.pyz",
        "node.sh",
    ]
    assert [file["mode"] for file in plan["files"]] == ["0600", "0600", "0700"]
    assert json.loads(plan["files"][0]["text"])["program"] == {
        "kind": "script",
        "target": "script.py",
        "args": [],
    }
    assert plan["commands"] == [
        {
            "argv": ["bash", plan["files"][2]["path"]],
            "env": {"CLUSTERJOB_NODE_RANK": "0"},
            "node_rank": 0,
        }
    ]
    assert not terminal.home.exists()


def test_notes_on_plan_go_to_stderr(terminal: Terminal) -> None:
    done = terminal("render", "--mem", "1G", terminal.script(""))
    assert "--mem" in done.stderr
    assert "not enforced" not in done.stdout


# -- status, list, logs, cancel --------------------------------------------------------------------


def test_status_and_list_show_jobs_in_all_states(terminal: Terminal) -> None:
    assert terminal("status").stdout == ""
    assert "no job" in terminal("status").stderr
    assert json.loads(terminal("list", "--json").stdout) == {"schema": 1, "jobs": []}
    good = terminal.submit("", "--name", "good")
    terminal("wait", good)
    bad = terminal.submit("raise SystemExit(3)", "--name", "bad")
    assert "FAILED" in terminal("wait", bad, code=3).stderr
    running = terminal.submit(SLEEPER, "--name", "running")
    terminal.wait_for("up0")
    listed = json.loads(terminal("list", "--json").stdout)
    assert listed["schema"] == 1
    assert [(job["id"], job["state"], job["exit_code"]) for job in listed["jobs"]] == [
        (running, "RUNNING", None),
        (bad, "FAILED", 3),
        (good, "SUCCEEDED", 0),
    ]
    for job in listed["jobs"]:
        assert job.keys() >= {
            "id",
            "name",
            "cluster",
            "backend",
            "backend_id",
            "state",
            "exit_code",
            "nodes",
            "submitted_at",
            "started_at",
            "ended_at",
            "reason",
            "restarts",
            "failure",
        }
        assert (
            job["cluster"],
            job["backend"],
            job["backend_id"],
            job["nodes"],
            job["restarts"],
        ) == ("local", "local", job["id"], 1, 0)
        assert RFC3339.fullmatch(job["submitted_at"])
        assert RFC3339.fullmatch(job["started_at"])
        assert (job["ended_at"] is None) == (job["state"] == "RUNNING")
    assert listed["jobs"][2]["failure"] is None
    assert listed["jobs"][1]["failure"]["exit_code"] == 3
    header, *rows = terminal("list").stdout.splitlines()
    assert header.split() == [
        *("ID", "STATE", "CODE", "NODES", "CLUSTER", "SUBMITTED", "DURATION", "REASON")
    ]
    assert [row.split()[:2] for row in rows] == [
        [running, "RUNNING"],
        [bad, "FAILED"],
        [good, "SUCCEEDED"],
    ]
    assert [row.split()[0] for row in terminal("status").stdout.splitlines()[1:]] == [running], (
        "without ids, those that have not ended"
    )
    table = terminal("status", bad, good).stdout
    assert [row.split()[0] for row in table.splitlines()[1:3]] == [bad, good]
    assert f"{bad} FAILED: rank 0" in table
    terminal("cancel", running)


def test_unique_prefix_of_job_id_is_accepted(terminal: Terminal) -> None:
    one, two = terminal.submit("", "--name", "one"), terminal.submit("", "--name", "two")
    terminal("wait", "on")
    terminal("wait", "tw")
    assert terminal.job("o")["id"] == one
    assert terminal.job(two)["id"] == two
    three = terminal.submit("", "--name", "three")
    done = terminal("status", "t", code=2)
    assert (done.stdout, len(done.stderr.splitlines())) == ("", 2)
    terminal("wait", three)
    four = terminal.submit(SLEEPER, "--name", "thrice")
    terminal.wait_for("up0")
    done = terminal("cancel", "t", code=2)
    assert f"{four} (RUNNING), {three} (SUCCEEDED), {two} (SUCCEEDED)" in done.stderr, (
        "the newest first, with their states"
    )
    terminal("cancel", four)


def test_script_with_syntax_error_is_reported_but_runs_under_other_interpreter(
    terminal: Terminal,
) -> None:
    done = terminal("run", terminal.script("print(1)\ndef f(:\n"), code=1)
    assert "clusterjob: script.py, line 2: SyntaxError: " in done.stderr.splitlines()[0]
    assert "FAILED: rank 0" in done.stderr


def test_job_id_keeps_non_ascii_letters_of_script_name(terminal: Terminal) -> None:
    terminal.script("print('done')", "обучение.py")
    done = terminal("run", "обучение.py")
    assert done.stdout == "done\n"
    assert re.search(r"job обучение-[a-z2-9]{6} SUCCEEDED", done.stderr)
    assert terminal.job("обуч")["state"] == "SUCCEEDED"


def test_unknown_job_id_is_refused_with_nearest_job_id(terminal: Terminal) -> None:
    job_id = terminal.submit("")
    terminal("wait", job_id)
    for command in (["status"], ["wait"], ["cancel"], ["logs"], ["logs", "-f"], ["status", job_id]):
        done = terminal(*command, f"{job_id[:-1]}1", code=2)
        assert done.stdout == ""
        assert f"there is no job '{job_id[:-1]}1'" in done.stderr
        assert f"did you mean {job_id}?" in done.stderr
    done = terminal("status", "zzzzzz", code=2)
    assert "clusterjob list" in done.stderr


def test_logs_filters_by_rank_node_and_tail(terminal: Terminal) -> None:
    job_id = terminal.submit(
        """
        import os, sys
        for number in range(3):
            print("line", number, "of", os.environ["RANK"])
        print("error of", os.environ["RANK"], file=sys.stderr)
        """,
        "--nodes",
        "2",
        "--nproc-per-node",
        "2",
    )
    terminal("wait", job_id)
    done = terminal("logs", job_id)
    assert len(done.stdout.splitlines()) == 12
    assert sorted(done.stderr.splitlines()) == [f"[{rank}] error of {rank}" for rank in range(4)]
    done = terminal("logs", job_id, "--rank", "2")
    assert done.stdout.splitlines() == [f"[2] line {number} of 2" for number in range(3)]
    assert done.stderr == "[2] error of 2\n"
    done = terminal("logs", "--node", "1", job_id)
    assert {line.split()[0] for line in done.stdout.splitlines()} == {"[2]", "[3]"}
    done = terminal("logs", "--rank", "0", "--tail", "2", job_id)
    assert len((done.stdout + done.stderr).splitlines()) == 2
    assert terminal("logs", "--tail", "0", job_id).stdout == ""
    assert terminal("logs", "--tail", "1000", job_id).stdout == terminal("logs", job_id).stdout


def test_logs_follow_with_tail_shows_unfinished_line_whole(terminal: Terminal) -> None:
    job_id = terminal.submit(
        """
        import os, pathlib, time
        print("whole line", flush=True)
        print("first half", end=" ", flush=True)
        pathlib.Path("up").touch()
        while not os.path.exists("leave"):
            time.sleep(0.01)
        print("second half")
        """
    )
    terminal.wait_for("up")
    following = terminal.start("logs", "-f", "--tail", "5", job_id)
    wait_until(lambda: "whole line" in terminal.output(following)[0], TEST_TIMEOUT)
    terminal.path("leave").touch()
    assert following.wait(TEST_TIMEOUT) == 0
    assert terminal.output(following)[0] == "whole line\nfirst half second half\n"


def test_logs_follow_works_from_another_terminal(terminal: Terminal) -> None:
    job_id = terminal.submit(WAITER + "    raise SystemExit(5)\n", "--nodes", "2")
    following = terminal.start("logs", "-f", job_id)
    wait_until(lambda: "line of 0" in terminal.output(following)[0], TEST_TIMEOUT)
    assert following.poll() is None
    terminal.path("leave").touch()
    assert following.wait(TEST_TIMEOUT) == 5
    out, err = terminal.output(following)
    assert sorted(out.splitlines()) == [
        "[0] left 0",
        "[0] line of 0",
        "[1] left 1",
        "[1] line of 1",
    ]
    assert re.search(r"^clusterjob: job \S+ FAILED: rank", err, re.MULTILINE)
    again = terminal("logs", "--follow", "--rank", "1", job_id, code=5)
    assert again.stdout == "[1] line of 1\n[1] left 1\n"


def test_cancel_ends_job_of_run_in_another_terminal(terminal: Terminal) -> None:
    running = terminal.start("run", "--nodes", "2", terminal.script(SLEEPER))
    terminal.wait_for("up0", "up1")
    job_id = terminal.only_job()["id"]
    done = terminal("cancel", job_id)
    assert (done.stdout, done.stderr) == ("", f"clusterjob: job {job_id} is cancelled\n")
    assert running.wait(TEST_TIMEOUT) == 143
    assert "CANCELLED" in terminal.output(running)[1]
    job = terminal.only_job()
    assert (job["state"], job["exit_code"], job["failure"]) == ("CANCELLED", 143, None)
    assert "had ended already" in terminal("cancel", job_id).stderr
    wait_for_no_processes()


def test_wait_and_logs_work_from_any_directory(terminal: Terminal, tmp_path: Path) -> None:
    job_id = terminal.submit("print('hello')")
    terminal("wait", job_id, cwd=tmp_path)
    assert terminal("logs", job_id, cwd=Path("/")).stdout == "hello\n"


# -- interruptions ---------------------------------------------------------------------------------


def test_ctrl_c_cancels_run(terminal: Terminal) -> None:
    running = terminal.start("run", "--nodes", "2", terminal.script(SLEEPER))
    terminal.wait_for("up0", "up1")
    wait_until(lambda: terminal.output(running)[0].count("line of") == 2, TEST_TIMEOUT)
    running.send_signal(signal.SIGINT)
    assert running.wait(TEST_TIMEOUT) == 130
    wait_for_no_processes()
    out, err = terminal.output(running)
    job = terminal.only_job()
    assert (job["state"], job["reason"]) == ("CANCELLED", "cancelled")
    assert "interrupting" in err
    assert PACKAGE not in err
    assert sorted(out.splitlines()) == ["[0] line of 0", "[1] line of 1"], (
        "what was shown is not shown again"
    )


# Send SIGINT to this process when it is about to import the module INTERRUPT_AT.
INTERRUPTER = """
import os, signal, sys
class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ.get("INTERRUPT_AT"):
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupter())
"""


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("run", "clusterjob.cli"),
        ("run", "typer"),
        ("run", "clusterjob.core.jobs"),
        ("run", "clusterjob.core.render"),
        ("run", "jinja2"),
        ("submit", "clusterjob.backends.local.backend"),
        ("list", "clusterjob.core.records"),
        ("launch", "clusterjob.node.launch"),
    ],
)
def test_ctrl_c_during_startup_prints_no_traceback(
    terminal: Terminal, tmp_path: Path, command: str, module: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTER)
    variables = os.environ | {
        "PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}",
        "INTERRUPT_AT": module,
    }
    program = [] if command == "list" else [terminal.script("")]
    process = terminal.start(command, *program, env=variables)
    assert process.wait(TEST_TIMEOUT) == 130
    assert "Traceback" not in terminal.output(process)[1]
    assert len(terminal.output(process)[1].splitlines()) <= 1


def test_run_shows_output_of_cancelled_workers(terminal: Terminal) -> None:
    running = terminal.start(
        "run",
        "--grace",
        "60",
        terminal.script("""
            import signal, sys, time
            def save(*_):
                print("saved")
                sys.exit(0)
            signal.signal(signal.SIGINT, save)
            print("up")
            while True:
                time.sleep(0.05)
        """),
    )
    # the output is shown, so `run` follows the job
    wait_until(lambda: terminal.output(running)[0] == "up\n", TEST_TIMEOUT)
    running.send_signal(signal.SIGINT)
    assert running.wait(TEST_TIMEOUT) == 130
    assert terminal.output(running)[0] == "up\nsaved\n"


@pytest.mark.parametrize("how", ["fork", "exec", "shell"])
def test_ctrl_c_raises_keyboard_interrupt_in_each_rank(terminal: Terminal, how: str) -> None:
    script = terminal.script("""
        import os, time
        rank = os.environ["RANK"]
        try:
            print("up", rank)
            time.sleep(1000)
        except KeyboardInterrupt:
            time.sleep(0.5)
            print("saved", rank)
    """)
    # bash does not forward signals; a terminal sends SIGINT to each process
    program = (
        ["--", "bash", "-c", f"{shlex.quote(sys.executable)} -u {script}; exit $?"]
        if how == "shell"
        else ["--start", how, script]
    )
    running = terminal.start("run", "--nodes", "2", "--grace", "60", *program)
    wait_until(lambda: terminal.output(running)[0].count("up") == 2, TEST_TIMEOUT)
    running.send_signal(signal.SIGINT)
    assert running.wait(TEST_TIMEOUT) == 130
    assert sorted(terminal.output(running)[0].splitlines()) == [
        "[0] saved 0",
        "[0] up 0",
        "[1] saved 1",
        "[1] up 1",
    ]
    assert terminal.only_job()["state"] == "CANCELLED"


def test_second_ctrl_c_kills_slow_workers(terminal: Terminal) -> None:
    script = terminal.script("""
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
        print("up")
        while True:
            time.sleep(0.05)
    """)
    running = terminal.start("run", "--grace", "1000", script)
    # the output is shown, so `run` follows the job
    wait_until(lambda: "up" in terminal.output(running)[0], TEST_TIMEOUT)
    running.send_signal(signal.SIGINT)
    wait_until(lambda: "interrupted" in terminal.output(running)[0], TEST_TIMEOUT)
    time.sleep(0.6)  # two signals within 0.5 s count as one keystroke
    running.send_signal(signal.SIGINT)
    assert running.wait(TEST_TIMEOUT) == 130
    assert PACKAGE not in terminal.output(running)[1]
    wait_for_no_processes()


@pytest.mark.parametrize("command", ["submit --follow", "logs -f"])
def test_ctrl_c_while_following_logs_does_not_cancel_job(terminal: Terminal, command: str) -> None:
    program = terminal.script(SLEEPER) if command.startswith("submit") else terminal.submit(SLEEPER)
    watching = terminal.start(*command.split(), program)
    wait_until(lambda: "line of 0" in terminal.output(watching)[0], TEST_TIMEOUT)
    watching.send_signal(signal.SIGINT)
    assert watching.wait(TEST_TIMEOUT) == 130
    assert PACKAGE not in terminal.output(watching)[1]
    job = terminal.only_job()
    assert job["state"] == "RUNNING"
    terminal("cancel", job["id"])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_killed_run_leaves_no_processes(terminal: Terminal, number: signal.Signals) -> None:
    script = terminal.script(
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + textwrap.dedent(SLEEPER)
    )
    running = terminal.start("run", "--nodes", "2", script)
    terminal.wait_for("up0", "up1")
    running.send_signal(number)
    running.wait(TEST_TIMEOUT)
    print(f"{number.name} of run: nothing was left after {wait_for_no_processes():.2f} s")
    job = terminal.only_job()
    assert job["state"] == "CANCELLED"
    assert job["reason"] == "the command that ran the job is gone"


def test_run_killed_during_setup_leaves_no_processes(terminal: Terminal) -> None:
    running = terminal.start(
        "run",
        "--nodes",
        "2",
        "--setup",
        'touch "in$CLUSTERJOB_NODE_RANK"; sleep 1000',
        terminal.script(""),
    )
    terminal.wait_for("in0", "in1")
    running.kill()
    running.wait(TEST_TIMEOUT)
    print(f"nothing was left after {wait_for_no_processes():.2f} s")
    assert terminal.only_job()["state"] in ("CANCELLED", "LOST")


def test_killed_submit_leaves_no_processes(terminal: Terminal) -> None:
    """Submit is killed when the first agent log exists; attempts that are too late do not count."""
    script = terminal.script(SLEEPER)
    jobs_dir = terminal.home / "jobs"
    hits = 0
    for number in range(8):
        submitting = terminal.start("submit", "--nodes", "12", "--name", f"killed{number}", script)
        wait_until(
            lambda number=number: list(jobs_dir.glob(f"killed{number}-*/logs/node0/agent.log")),
            TEST_TIMEOUT,
        )
        submitting.kill()
        submitting.wait(TEST_TIMEOUT)
        # too late: submit prints the id as its last step
        if terminal.output(submitting)[0] or list(jobs_dir.glob(f"killed{number}-*/detached")):
            terminal("cancel", f"killed{number}")
            continue
        hits += 1
        print(f"nothing was left after {wait_for_no_processes():.2f} s")
        job = terminal.job(f"killed{number}")
        assert job["state"] in ("CANCELLED", "LOST")
        assert job["reason"]
        if hits == 3:
            break
    assert hits


def test_ctrl_c_in_terminal_interrupts_workers_once(terminal: Terminal) -> None:
    """The terminal signals only the command, which forwards the signal to the workers."""
    script = terminal.script("""
        import pathlib, signal, time
        def on(number, _):
            pathlib.Path("got").open("a").write(f"{signal.Signals(number).name} ")
        signal.signal(signal.SIGINT, on)
        signal.signal(signal.SIGTERM, on)
        print("up")
        while not pathlib.Path("got").exists():
            time.sleep(0.05)
        time.sleep(0.5)  # a second signal would arrive now
    """)
    with pseudo_terminal() as (master, slave):
        session = {
            "stdin": slave,
            "start_new_session": True,
            "preexec_fn": lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        }
        running = terminal.start("run", script, **session)
        # the output is shown, so `run` follows the job
        wait_until(lambda: "up" in terminal.output(running)[0], TEST_TIMEOUT)
        os.write(master, b"\x03")
        assert running.wait(TEST_TIMEOUT) == 130
    wait_for_no_processes()
    assert terminal.path("got").read_text() == "SIGINT "


def test_run_in_terminal_shows_progress_of_waiting_job(terminal: Terminal) -> None:
    with pseudo_terminal() as (master, slave):
        running = terminal.start(
            "run",
            "--setup",
            "while [ ! -e go ]; do sleep 0.02; done",
            terminal.script("print('hello')"),
            stderr=slave,
        )
        shown = b""

        def starting() -> bool:
            nonlocal shown
            with contextlib.suppress(BlockingIOError):
                shown += os.read(master, 65536)
            return b"starting the agents (" in shown

        os.set_blocking(master, False)
        wait_until(starting, TEST_TIMEOUT, "a line that says what is waited for")
        terminal.path("go").touch()
        assert running.wait(TEST_TIMEOUT) == 0
        assert terminal.output(running)[0] == "hello\n"


@contextlib.contextmanager
def pseudo_terminal() -> Iterator[tuple[int, int]]:
    master, slave = pty.openpty()
    try:
        yield master, slave
    finally:
        os.close(slave)
        os.close(master)


# -- usage errors ----------------------------------------------------------------------------------

THIS_PYTHON = ["submit", "--python", sys.executable]
USAGE = {
    "no script": (
        ["submit", "scirpt.py"],
        "the script 'scirpt.py' does not exist",
        "did you mean script.py?",
    ),
    "no script at all": (["run", "nosuch.sh"], "the script 'nosuch.sh' does not exist", ""),
    "a directory": (["run", "folder"], "'folder' is not a file", ""),
    "a shell script": (["run", "train.sh"], "'train.sh' is not a Python script", "-- ./train.sh"),
    "nothing": (["run"], "nothing to run", "SCRIPT"),
    "nothing after --": (["run", "--"], "nothing to run", "SCRIPT"),
    "nothing after -m": (["run", "-m"], "nothing to run", "SCRIPT"),
    "an empty command": (["run", "--", ""], "the command is empty", ""),
    "no module": (
        ["run", "-m", "not-a/module"],
        "'not-a/module' is not a module name",
        "package.train",
    ),
    "nodes 0": (["submit", "--nodes", "0", "script.py"], "--nodes 0: the least", ""),
    "nodes -1": (["submit", "--nodes", "-1", "script.py"], "--nodes -1", ""),
    "nodes --5": (["submit", "--nodes=--5", "script.py"], "'--5' is not a whole number", ""),
    "nodes 1.5": (["submit", "--nodes", "1.5", "script.py"], "'1.5' is not a whole number", ""),
    "nodes ²": (["submit", "--nodes", "²", "script.py"], "'²' is not a whole number", ""),
    "many digits": (["submit", "--nodes", "9" * 5000, "script.py"], "is not a whole number", ""),
    "nproc 0": (["submit", "--nproc-per-node", "0", "script.py"], "--nproc-per-node 0", ""),
    "gpus -1": (["submit", "--gpus-per-node", "-1", "script.py"], "--gpus -1", ""),
    "cpus 0": (["submit", "--cpus-per-task", "0", "script.py"], "--cpus-per-task 0", ""),
    "restarts -1": (["submit", "--max-restarts", "-1", "script.py"], "--max-restarts -1", ""),
    "bad memory": (
        ["submit", "--mem", "12 potatoes", "script.py"],
        "'12 potatoes' is not a memory size",
        "64G",
    ),
    "huge memory": (
        ["submit", "--mem", "9" * 400 + "G", "script.py"],
        "is not a memory size",
        "64G",
    ),
    "bad duration": (
        ["submit", "--time", "1 fortnight", "script.py"],
        "'1 fortnight' is not a duration",
        "90s",
    ),
    "huge duration": (
        ["submit", "--time", "9" * 400 + "h", "script.py"],
        "is not a duration",
        "90s",
    ),
    "cluster": (
        ["submit", "--cluster", "lcoal", "script.py"],
        "there is no cluster 'lcoal'",
        "did you mean local?",
    ),
    "env": (
        ["submit", "--env", "NOVALUE", "script.py"],
        "--env NOVALUE: it is not set here",
        "--env NOVALUE=VALUE",
    ),
    "env name": (
        ["submit", "--env", "A-B=1", "script.py"],
        "'A-B' is not a valid variable name",
        "--env",
    ),
    "reserved variable": (
        ["submit", "--env", "RANK=1", "script.py"],
        "RANK is set by the launcher",
        "--env",
    ),
    "workdir": (["submit", "--workdir", "nowhere", "script.py"], "nowhere' does not exist", ""),
    "home of unknown user": (
        ["submit", "--workdir", "~nobody-of-this-name/x", "script.py"],
        "nobody-of-this-name",
        "",
    ),
    "name": (["submit", "--name", "a\nb", "script.py"], "is not a valid job name", "printable"),
    "start": (["submit", "--start", "spwan", "script.py"], "start is 'spwan'", "fork"),
    "launcher": (
        ["submit", "--launcher", "mpirun", "script.py"],
        "launcher is 'mpirun'",
        "torchrun",
    ),
    "grace 0": (["submit", "--grace", "0", "script.py"], "grace is 0", ""),
    "grace nan": (["submit", "--grace", "nan", "script.py"], "grace is nan", ""),
    "grace x": (["submit", "--grace", "x", "script.py"], "'x' is not a number of seconds", ""),
    "set": (["submit", "--set", "partition=gpu", "script.py"], "unknown option 'partition'", ""),
    "option of Slurm": (["submit", "-p", "gpu", "script.py"], "(--partition or --set)", "Slurm"),
    "option of ssh": (
        ["submit", "--transport", "openssh", "script.py"],
        "(--transport or --set)",
        "use --hosts or --login",
    ),
    "set without value": (
        ["submit", "--set", "partition", "script.py"],
        "'partition' is not KEY=VALUE",
        "",
    ),
    "template": (
        ["submit", "--template", "nosuch.j2", "script.py"],
        "nosuch.j2' does not exist",
        "",
    ),
    "undefined": (
        ["submit", "--template", "undefined.j2", "script.py"],
        "undefined.j2, line 2: 'no_such_name' is undefined",
        "",
    ),
    "unquoted": (
        ["submit", "--template", "unquoted.j2", "script.py"],
        "unquoted.j2, line 3: the value",
        "sh",
    ),
    "broken": (["submit", "--template", "broken.j2", "script.py"], "broken.j2, line 2: ", ""),
    "wrong": (["submit", "--template", "wrong.j2", "script.py"], "wrong.j2, line 2: ", ""),
    "unknown option": (
        ["submit", "--nodez", "2", "script.py"],
        "there is no option --nodez",
        "did you mean --nodes?",
    ),
    "unknown option without near match": (
        ["status", "--xyzzy"],
        "there is no option --xyzzy",
        "--help",
    ),
    "torchrun's elastic nodes": (
        ["run", "--nnodes", "4:1", "script.py"],
        "4:1: MIN must be at least 1, and at most MAX",
        "write it as 2:4",
    ),
    "torchrun's underscores": (
        ["run", "--nproc_per_nod=2", "script.py"],
        "no option --nproc-per-nod",
        "did you mean --nproc-per-node?",
    ),
    "torchrun's master port": (
        ["run", "--master_port", "1", "script.py"],
        "no option --master-port",
        "find each other",
    ),
    "torchrun's logs": (
        ["run", "--tee", "3", "script.py"],
        "there is no option --tee",
        "clusterjob logs",
    ),
    "sbatch's chdir": (
        ["submit", "-D", "/tmp", "script.py"],
        "there is no option -D",
        "did you mean --workdir?",
    ),
    "sbatch's constraint": (
        ["submit", "--constraint", "a100", "script.py"],
        "there is no option --constraint",
        "--set constraint=VALUE",
    ),
    "no GPUs": (
        ["run", "--gpus", "all", "script.py"],
        "'all' names no GPUs",
        "device=5",
    ),
    "GPUs of a type": (
        ["run", "--gpus", "a100:8", "script.py"],
        "cannot choose GPUs by their type",
        "--gpus 8",
    ),
    "two numbers of GPUs": (
        ["run", "--gpus", "2", "--gpus-per-node", "4", "script.py"],
        "--gpus 2 and --gpus-per-node 4 ask for different GPUs",
        "leave one of them out",
    ),
    "time 0": (["submit", "--time", "0", "script.py"], "'0': a duration must be positive", "90s"),
    "script with syntax error": (
        [*THIS_PYTHON, "broken.py"],
        "broken.py, line 2: SyntaxError: ",
        "no node could run it",
    ),
    "module with syntax error": (
        [*THIS_PYTHON, "-m", "folder.broken"],
        "folder/broken.py, line 1: IndentationError: ",
        "",
    ),
    "no interpreter": (
        ["run", "--python", "./nosuch", "script.py"],
        "there is no interpreter ./nosuch",
        "--python",
    ),
    "no interpreter on PATH": (
        ["run", "--python", "nosuch", "script.py"],
        "there is no interpreter nosuch",
        "--python",
    ),
    "duplicate host": (
        ["submit", "--hosts", "a,b,a", "script.py"],
        "the host a is named twice",
        "--nproc-per-node 2",
    ),
    "unknown verb": (["sbumit", "script.py"], "No such command 'sbumit'", "--help"),
    "verb of another program": (["kill", "x"], "there is no command kill", "`clusterjob cancel`"),
    "no value": (["submit", "--nodes"], "'--nodes' requires an argument", "--help"),
    "no id": (["exec"], "Missing argument", "--help"),
    "no job": (["logs", "-f"], "no job is recorded", "`clusterjob submit train.py`"),
    "tail": (["logs", "x", "--tail", "-1"], "--tail", "--help"),
}


@pytest.mark.parametrize("case", USAGE)
def test_bad_arguments_are_refused_with_one_line_and_hint(
    terminal: Terminal,
    case: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The many cases run in this process, which is faster than a process each."""
    args, message, hint = USAGE[case]
    terminal.script("")
    terminal.path("folder").mkdir()
    terminal.script("print(1)\ndef f(:\n", "broken.py")
    terminal.script("  x\ny", "folder/broken.py")
    terminal.script("#!/bin/bash\necho hello\n", "train.sh")
    terminal.script("#!/bin/bash\n{{ no_such_name|sh }}\n", "undefined.j2")
    terminal.script("#!/bin/bash\n\ncd {{ workdir }}\n", "unquoted.j2")
    terminal.script("#!/bin/bash\n{% if %}\n", "broken.j2")
    terminal.script("#!/bin/bash\n{{ nnodes|sh_words }}\n", "wrong.j2")
    monkeypatch.chdir(terminal.directory)
    code = command_line(args)
    out, err = capsys.readouterr()
    assert code == 2
    assert_one_line_and_hint(terminal, out, err, message, hint)


CONFIGURATIONS = {
    "broken": (
        "[defaults]\nnodes = \n",
        "is not valid TOML: Invalid value (at line 2,",
        "a text needs quotes",
    ),
    "unknown key": ("[defaults]\nnodez = 1\n", "nodez", "did you mean nodes?"),
    "time without a unit": (
        "[defaults]\ntime = 7200\n",
        "[defaults] time: 7200 has no unit",
        'write time = "7200m" or time = "7200s"',
    ),
    "unknown top key": ("default = 1\n", "default", "did you mean defaults?"),
    "unknown key of a cluster": (
        "[clusters.lab]\nbackend = 'local'\nnode = 1\n",
        "[clusters.lab] node",
        "did you mean nodes?",
    ),
    "wrong value": (
        "[defaults]\nmem = '12 potatoes'\n",
        "[defaults] mem: '12 potatoes' is not a memory size",
        "64G",
    ),
    "wrong type": ("[defaults]\nenv = 3\n", "[defaults] env: 3", "describes each option"),
    "unknown cluster": (
        "cluster = 'lab'\n[clusters.lap]\nbackend = 'local'\n",
        "there is no cluster 'lab'",
        "did you mean lap?",
    ),
    "unknown backend": (
        "cluster = 'lab'\n[clusters.lab]\nbackend = 'lcoal'\n",
        "lcoal",
        "did you mean local?",
    ),
}


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_bad_configuration_file_is_refused_with_one_line_and_hint(
    terminal: Terminal, case: str
) -> None:
    text, message, hint = CONFIGURATIONS[case]
    terminal.path("clusterjob.toml").write_text(text)
    done = terminal("submit", terminal.script(""), code=2)
    error = assert_one_line_and_hint(terminal, done.stdout, done.stderr, message, hint)
    assert str(terminal.path("clusterjob.toml")) in error


def assert_one_line_and_hint(
    terminal: Terminal, out: str, err: str, message: str, hint: str
) -> str:
    assert out == ""
    assert not terminal.home.exists(), "nothing was started and nothing was written"
    first, *rest = err.splitlines()
    assert first.startswith("clusterjob: error: ")
    assert message in first
    assert len(rest) == 1, f"one line and one hint, not\n{err}"
    assert rest[0].startswith("  hint: ")
    assert hint in rest[0]
    return first


def test_bad_value_in_variable_error_names_variable(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTERJOB_NODES", "two")
    done = terminal("submit", terminal.script(""), code=2)
    assert_one_line_and_hint(
        terminal,
        done.stdout,
        done.stderr,
        "CLUSTERJOB_NODES: 'two' is not a whole number",
        "describes each option",
    )


def test_verbose_option_shows_cause_of_error(terminal: Terminal) -> None:
    terminal.path("clusterjob.toml").write_text("[defaults\n")
    command = [*CLUSTERJOB, "-v", "config"]
    done = subprocess.run(
        command,
        check=False,
        cwd=terminal.directory,
        capture_output=True,
        text=True,
        timeout=TEST_TIMEOUT,
    )
    assert done.returncode == 2
    assert "TOMLDecodeError" in done.stderr


@pytest.mark.parametrize(
    ("variables", "source"),
    [
        (
            {
                "CLUSTERJOB_NNODES": "2",
                "CLUSTERJOB_NODE_RANK": "1",
                "CLUSTERJOB_MASTER_ADDR": "host0",
            },
            "clusterjob",
        ),
        (
            {
                "RANK": "1",
                "LOCAL_RANK": "1",
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "host0",
                "MASTER_PORT": "29500",
            },
            "env",
        ),
        ({"RANK": "1"}, "RANK"),
    ],
)
def test_submit_inside_job_is_refused_without_cluster_option(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], source: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    script = terminal.script("print('hello')")
    for command in ("submit", "run", "render"):
        done = terminal(command, script, code=2)
        assert done.stdout == ""
        assert source in done.stderr
        assert next(iter(variables)) in done.stderr
        assert "clusterjob launch" in done.stderr
        assert "--cluster" in done.stderr
    assert not terminal.home.exists()
    assert terminal("run", "--cluster", "local", script).stdout == "hello\n"


# -- env and config --------------------------------------------------------------------------------


def test_env_shows_detected_environment(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {
        "nnodes",
        "node_rank",
        "nproc_per_node",
        "master_addr",
        "master_port",
        "rank",
        "local_rank",
        "world_size",
        "local_world_size",
    }
    result = json.loads(terminal("env", "--json").stdout)
    assert (
        result.keys() == {"schema", "source", "level", "evidence", "ignored", "conflicts"} | fields
    )
    assert (
        result["schema"],
        result["source"],
        result["level"],
        result["evidence"],
        result["conflicts"],
    ) == (
        1,
        "none",
        "none",
        {},
        [],
    )
    assert all(result[field] is None for field in fields)
    monkeypatch.setenv("CLUSTERJOB_NNODES", "2")
    monkeypatch.setenv("CLUSTERJOB_NODE_RANK", "1")
    done = terminal("env", "--json", code=1)
    result = json.loads(done.stdout)
    assert result["level"] == "none"
    assert "CLUSTERJOB_MASTER_ADDR" in result["conflicts"][0]
    assert "conflict: CLUSTERJOB_MASTER_ADDR is not set" in terminal("env", code=1).stdout
    monkeypatch.setenv("CLUSTERJOB_MASTER_ADDR", "host0")
    result = json.loads(terminal("env", "--json").stdout)
    assert (
        result["level"],
        result["nnodes"],
        result["node_rank"],
        result["master_addr"],
        result["rank"],
    ) == ("node", 2, 1, "host0", None)
    assert result["evidence"]["master_addr"] == "CLUSTERJOB_MASTER_ADDR"
    table = terminal("env").stdout
    assert re.search(r"^nnodes\s+2\s+CLUSTERJOB_NNODES$", table, re.MULTILINE)


def test_config_shows_origin_of_each_setting(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = terminal.path("clusterjob.toml")
    path.write_text(
        "cluster = 'lab'\n[defaults]\nmem = '1G'\n"
        "[clusters.lab]\nbackend = 'local'\nworkdir = '/tmp'\nsetup = 'true'\n"
        "secret = ['TOKEN', 'KEY=k']\nenv = {A = '1', B = '2'}\n"
    )
    monkeypatch.setenv("CLUSTERJOB_NODES", "3")
    result = json.loads(terminal("config", "--json").stdout)
    assert (result["schema"], result["cluster"], result["backend"]) == (1, "lab", "local")
    settings = result["settings"]
    assert settings["nodes"] == {"value": 3, "origin": "CLUSTERJOB_NODES"}
    origin = f"{path}: [defaults] mem"
    assert settings["mem"] == {"value": "1G", "bytes": 1024**3, "origin": origin}
    assert settings["workdir"] == {"value": "/tmp", "origin": f"{path}: [clusters.lab] workdir"}
    assert settings["setup"]["value"] == ["true"]
    assert settings["secret"]["value"] == ["TOKEN", f"KEY={path.parent}/k"]
    shown = terminal("config").stdout
    assert re.search(r"^nodes\s+3\s+CLUSTERJOB_NODES$", shown, re.MULTILINE)
    assert f" TOKEN, KEY={path.parent}/k " in shown
    assert " A=1, B=2 " in shown
    assert re.search(r"^mem\s+1G ", shown, re.MULTILINE)
    assert "mem" in terminal("config", "--cluster", "local").stdout
    terminal("config", "--cluster", "nosuch", code=2)


# -- help, closed stdout and encodings -------------------------------------------------------------

VERBS = [
    "submit",
    "run",
    "render",
    "launch",
    "status",
    "list",
    "wait",
    "cancel",
    "logs",
    "env",
    "config",
]


def test_help_goes_to_stdout(terminal: Terminal) -> None:
    done = terminal("--help")
    assert done.stderr == ""
    assert all(re.search(rf"^  {verb} +\S", done.stdout, re.MULTILINE) for verb in VERBS)
    done = terminal(code=2)
    assert done.stdout == ""
    assert "Usage" in done.stderr
    assert re.fullmatch(r"clusterjob \d+\.\d+\.\d+\S*\n", terminal("--version").stdout)


@pytest.mark.parametrize("verb", VERBS)
def test_each_command_has_help(terminal: Terminal, verb: str) -> None:
    done = terminal(verb, "--help")
    assert done.stderr == ""
    assert verb in done.stdout
    if verb in ("submit", "run", "render"):
        assert "SCRIPT [ARGS]" in done.stdout
        assert "--gpus-per-node" in done.stdout


@pytest.mark.parametrize(
    "args",
    [
        ["list"],
        ["list", "--json"],
        ["status", "--json"],
        ["logs", "ID"],
        ["render", "script.py"],
        ["--help"],
    ],
)
def test_closed_stdout_prints_no_error(terminal: Terminal, args: list[str]) -> None:
    terminal("run", terminal.script("print('hello')"))
    args = [terminal.only_job()["id"] if word == "ID" else word for word in args]
    read, write = os.pipe()
    os.close(read)  # each write fails with EPIPE
    try:
        done = subprocess.run(
            [*CLUSTERJOB, *args],
            check=False,
            cwd=terminal.directory,
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TEST_TIMEOUT,
        )
    finally:
        os.close(write)
    assert done.stderr == ""


def test_list_piped_into_head_prints_no_error(terminal: Terminal) -> None:
    for _ in range(3):
        terminal("wait", terminal.submit(""))
    command = f"{shlex.join([*CLUSTERJOB, 'list'])} | head -1"
    done = subprocess.run(
        ["bash", "-c", command],
        check=False,
        cwd=terminal.directory,
        capture_output=True,
        text=True,
        timeout=TEST_TIMEOUT,
    )
    assert done.stdout.split()[:2] == ["ID", "STATE"]
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


def test_output_not_encodable_in_terminal_is_shown(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = terminal(
        "run",
        "--name",
        "schneemann ☃",
        terminal.script("import os; os.write(1, '☃ \\n'.encode() + b'\\xff\\n')"),
    )
    assert len(done.stdout.splitlines()) == 2
    assert terminal.only_job()["name"] == "schneemann ☃"


def test_arguments_that_are_not_utf8_reach_script(terminal: Terminal) -> None:
    script = terminal.script("import os, sys; print(ascii(sys.argv[1:]))")
    assert terminal("run", script, "\udcff").stdout == "['\\udcff']\n"
    terminal("render", script, "\udcff")
    terminal("render", "--json", script, "\udcff")
    assert terminal.only_job()["state"] == "SUCCEEDED"


def test_run_succeeds_after_job_directory_is_moved(terminal: Terminal) -> None:
    running = terminal.start("run", "--nodes", "2", terminal.script(WAITER))
    terminal.wait_for("up0", "up1")
    job = terminal.only_job()
    moved = Path(job["job_dir"]).rename(terminal.path("moved"))
    terminal.path("leave").touch()
    assert running.wait(TEST_TIMEOUT) == 0
    assert moved.exists()
    assert "SUCCEEDED" in terminal.output(running)[1]
    assert "its directory cannot be written" in terminal.output(running)[1]
    assert PACKAGE not in terminal.output(running)[1]


def test_logs_of_unknown_rank_or_node_is_refused(terminal: Terminal) -> None:
    job_id = terminal.submit("print('hello')")
    terminal("wait", job_id)
    assert "has no rank 1" in terminal("logs", job_id, "--rank", "1", code=2).stderr
    assert "has no node 3" in terminal("logs", job_id, "--node", "3", code=2).stderr


def test_workers_start_by_exec_with_one_notice_if_import_torch_fails(
    terminal: Terminal,
) -> None:
    why = "starts its workers by exec: import torch failed: libcudart.so.99 is not there"
    broken = terminal.path("torch")
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('libcudart.so.99 is not there')\n")
    script = terminal.script("""
        import os, time
        print("ran", flush=True)
        while not os.path.exists("leave"):
            time.sleep(0.01)
    """)
    running = terminal.start(
        "run", "--setup", f"export PYTHONPATH='{broken.parent}':$PYTHONPATH", script
    )
    wait_until(
        lambda: "ran" in terminal.output(running)[0] and why in terminal.output(running)[1],
        TEST_TIMEOUT,
    )
    terminal.path("leave").touch()
    assert running.wait(TEST_TIMEOUT) == 0
    out, err = terminal.output(running)
    assert out == "ran\n", (
        "a store that cannot be served is no reason to stop a job that wants none"
    )
    assert err.count(why) == 1


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--set", "connect_timeout=abc"], "connect_timeout: 'abc' is not a number of seconds"),
        (["--set", "conect_timeout=3"], "unknown option 'conect_timeout'"),
        (["--set", "remote_home=jobs"], "remote_home: 'jobs' is not an absolute path"),
        (["--hostfile", "hosts"], "--hosts and --hostfile are both given"),
    ],
)
@pytest.mark.parametrize("command", [["hosts"], ["render", "--cluster", "ssh", "train.py"]])
def test_ssh_options_are_checked_by_hosts_and_render(
    terminal: Terminal, command: list[str], flags: list[str], why: str
) -> None:
    terminal.script("", "train.py")
    done = terminal(
        command[0], *command[1:-1], "--hosts", "gpu1.invalid", *flags, *command[1:][-1:], code=2
    )
    assert done.stdout == ""
    assert why in done.stderr


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        ("", ">&-", 0),
        ("export PYTHONINSPECT=1;", "", 0),
        ("mkdir gone; cd gone; rmdir ../gone;", "2>&1", 2),
    ],
    ids=["closed stdout", "inspect", "deleted directory"],
)
def test_run_in_an_odd_shell(terminal: Terminal, before: str, after: str, code: int) -> None:
    script = terminal.script("open('ran', 'w'); print('ran')")
    command = f"{before} {shlex.join(CLUSTERJOB)} run --cluster local {script} {after}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=terminal.directory, capture_output=True, text=True,
        check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert (terminal.directory / "ran").exists() == (code == 0)
    assert ("the working directory was deleted" in done.stdout) == (code == 2)


def test_workers_keep_the_link_in_pwd(terminal: Terminal) -> None:
    (terminal.directory / "real").mkdir()
    (terminal.directory / "link").symlink_to("real")
    run = shlex.join([*CLUSTERJOB, "run", "--cluster", "local", "--", "sh", "-c", "echo $PWD"])
    done = subprocess.run(
        ["bash", "-c", f"cd link && {run}"], cwd=terminal.directory, capture_output=True,
        text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.stdout == f"{terminal.directory}/link\n", done.stderr
