"""End-to-end tests of the command line: stdout, stderr and exit codes of each command.

Each command runs in its own process, with real jobs.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from command_user import END_TIMEOUT, CommandUser
from commands import CLUSTERJOB, PACKAGE
from launching import HOST, write_tree
from procs import TEST_TIMEOUT, wait_for_no_processes, wait_until
from slurm_user import SLEEPER

from clusterjob.cli import main as command_line

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


# -- starting jobs ---------------------------------------------------------------------------------


def test_submit_prints_only_job_id_or_json_and_detaches(local_user: CommandUser) -> None:
    done = local_user("submit", "--json", "--name", "a name", local_user.script(""))
    result = json.loads(done.stdout)
    assert (result["schema"], result["cluster"], result["backend"]) == (1, "local", "local")
    assert result["id"].startswith("a-name-")
    assert Path(result["job_dir"]).is_dir()
    local_user("wait", result["id"])
    local_user("clean", "--all", "--yes")
    done = local_user("submit", "--nodes", "2", local_user.script(WAITER, "script2.py"))
    assert re.fullmatch(r"script2-[a-z2-9]{6}\n", done.stdout)
    assert done.stderr == ""
    local_user.wait_for("up0", "up1")
    assert local_user.only_job()["state"] == "RUNNING"
    local_user.path("leave").touch()
    job_id = done.stdout.strip()
    done = local_user("wait", job_id)
    assert (done.stdout, done.stderr) == ("", f"clusterjob: job {job_id} SUCCEEDED\n")


@pytest.mark.parametrize("code", [0, 3])
def test_run_exits_with_exit_code_of_job(local_user: CommandUser, code: int) -> None:
    script = local_user.script(
        f"import sys; print('to stdout'); print('to stderr', file=sys.stderr); sys.exit({code})"
    )
    done = local_user("run", script, code=code)
    assert done.stdout == "to stdout\n", (
        "the output of one worker has no labels, so that it can be piped on"
    )
    assert "\nto stderr\nclusterjob: " in done.stderr
    state = "FAILED" if code else "SUCCEEDED"
    assert re.search(rf"^clusterjob: job script-\w+ {state}", done.stderr, re.MULTILINE)
    assert ("  logs: " in done.stderr) == bool(code)
    assert local_user.only_job()["exit_code"] == code


@pytest.mark.parametrize(
    ("statement", "code", "signal_name", "how"),
    [
        ("raise ValueError('boom')", 1, None, "ValueError: boom"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL", "SIGKILL"),
    ],
    ids=["raise", "kill"],
)
def test_run_reports_failed_rank_and_cause(
    local_user: CommandUser, statement: str, code: int, signal_name: str | None, how: str
) -> None:
    script = local_user.script(f"""
        import os, signal, sys, time
        if os.environ["RANK"] == "1":
            print("last words", file=sys.stderr, flush=True)
            {statement}
        time.sleep(1000)
    """)
    done = local_user("run", "--nodes", "2", script, code=code)
    place = re.escape(f"rank 1 (node 1, local rank 0, host {HOST}): ")
    assert re.search(rf"^clusterjob: job \S+ FAILED: {place}.*{how}", done.stderr, re.MULTILINE)
    assert "\n  | last words\n" in done.stderr
    assert done.stdout == ""
    shown = {
        "rank": 1, "local_rank": 0, "node_rank": 1, "host": HOST, "exit_code": code,
        "signal": signal_name,
    }  # fmt: skip
    assert local_user.only_job()["failure"].items() >= shown.items()


def test_submit_follow_exits_with_exit_code_of_job(local_user: CommandUser) -> None:
    done = local_user(
        "submit", "--follow", local_user.script("print('hello'); raise SystemExit(4)"), code=4
    )
    job_id, *rest = done.stdout.splitlines()
    assert job_id == local_user.only_job()["id"]
    assert rest == ["hello"]
    assert "FAILED" in done.stderr


PRINTS = "import sys; print(__name__, sys.argv[1:])"
PASSED = ["--nodes", "7", "-h", "--json", "--version", "--", "-m", "x", "", "a b", "☃"]
VARIABLES = """
    import os
    print(*(os.environ[name] for name in "ABCD"))
"""
# The words of `run`, and what the program prints.
RUNS = {
    "module": (["-m", "package.train", "--nodes", "7", "-m", "x"], "__main__ {words[2:]}"),
    "command": (
        ["--name", "shell", "--", "bash", "-c", 'echo "$0" "$1" $RANK', "--help", "a  b"],
        "--help a  b 0",
    ),
    "arguments": (["./--nodes.py", *PASSED], "__main__ {words[1:]}"),
    "options before": (
        ["--nodes=1", "--name", "-x", "./--nodes.py", "--nodes=9"],
        "__main__ ['--nodes=9']",
    ),
    "not UTF-8": (["./--nodes.py", "\udcff"], "__main__ ['\\udcff']"),
    "variables": (
        ["--env", "B=x=y z", "--env", "D=", "--setup", "C=$C,flag", "variables.py"],
        "file x=y z file,flag ",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_run_gives_program_its_arguments_and_variables(local_user: CommandUser, name: str) -> None:
    config = '[defaults]\nenv = {A = "file", B = "file"}\nsetup = ["export C=file"]\n'
    files = {"package/train.py": PRINTS, "--nodes.py": PRINTS, "clusterjob.toml": config}
    write_tree(local_user.directory, **files, **{"variables.py": textwrap.dedent(VARIABLES)})
    local_user("trust", "--yes")
    words, shown = RUNS[name]
    expected = shown.replace("{words[2:]}", str(words[2:])).replace("{words[1:]}", str(words[1:]))
    assert local_user("run", *words).stdout == f"{expected}\n"


def test_run_without_gpus_uses_cpu_and_prints_one_line(
    local_user: CommandUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    script = local_user.script("import os; print(os.environ['CUDA_VISIBLE_DEVICES'] or 'none')")
    done = local_user("run", "--gpus-per-node", "1", script)
    assert done.stdout == "none\n"
    assert len([line for line in done.stderr.splitlines() if "GPUs" in line and "CPU" in line]) == 1
    monkeypatch.setenv("CLUSTERJOB_REQUIRE_GPUS", "1")
    error = local_user("run", "--gpus-per-node", "1", script, code=2).stderr
    assert ("0 of the 1 GPUs" in error, "--no-require-gpus" in error) == (True, True)
    local_user("run", "--gpus-per-node", "1", "--no-require-gpus", script)


# -- the plan --------------------------------------------------------------------------------------


def test_render_prints_plan_and_writes_no_file(local_user: CommandUser) -> None:
    options = ("--nodes", "2", "--env", "A=it's", "--setup", "module load cuda", "--mem", "1G")
    texts = []
    for command in (["render"], ["submit", "--dry-run"]):
        done = local_user(*command, *options, local_user.script(""), "--flag")
        assert done.stderr == "clusterjob: --mem is not enforced on this machine\n"
        texts.append(re.sub(r"script-[a-z2-9]{6}", "ID", done.stdout))
    assert texts[0] == texts[1]
    script = f"{local_user.home}/jobs/ID/node.sh"
    for part in (f"### {script} (0700)\n#!/usr/bin/env bash\n", "module load cuda", "export A="):
        assert part in texts[0]
    assert texts[0].splitlines()[-2:] == [
        f"CLUSTERJOB_NODE_RANK={rank} bash {script}" for rank in (0, 1)
    ]
    assert not local_user.home.exists()


# -- status, list, logs, cancel --------------------------------------------------------------------


def test_status_and_list_show_jobs_in_all_states(local_user: CommandUser) -> None:
    assert local_user("status").stdout == ""
    assert "no job" in local_user("status").stderr
    assert json.loads(local_user("list", "--json").stdout) == {"schema": 1, "jobs": []}
    good = local_user.submit("", "--name", "good")
    local_user("wait", good)
    bad = local_user.submit("raise SystemExit(3)", "--name", "bad")
    local_user("wait", bad, code=3)
    running = local_user.submit(SLEEPER, "--name", "running", until=("up0",))
    jobs = json.loads(local_user("list", "--json").stdout)["jobs"]
    assert [(job["id"], job["state"], job["exit_code"]) for job in jobs] == [
        (running, "RUNNING", None),
        (bad, "FAILED", 3),
        (good, "SUCCEEDED", 0),
    ]
    for job in jobs:
        assert job.items() >= {
            "cluster": "local", "backend": "local", "backend_id": job["id"], "nodes": 1,
            "restarts": 0,
        }.items()  # fmt: skip
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]{8}\.\d+Z", job["started_at"])
        assert (job["ended_at"] is None) == (job["state"] == "RUNNING")
    assert [row.split()[0] for row in local_user("status").stdout.splitlines()[1:]] == [running], (
        "without ids, those that have not ended"
    )
    table = local_user("status", bad, good).stdout
    assert [row.split()[0] for row in table.splitlines()[:3]] == ["ID", bad, good]
    assert f"{bad} FAILED: rank 0" in table
    local_user("cancel", running)


def test_script_with_syntax_error_is_reported_but_runs_under_other_interpreter(
    local_user: CommandUser,
) -> None:
    done = local_user("run", local_user.script("print(1)\ndef f(:\n"), code=1)
    assert "clusterjob: script.py, line 2: SyntaxError: " in done.stderr.splitlines()[0]
    assert "FAILED: rank 0" in done.stderr


def test_logs_follow_ends_with_the_job_and_shows_unfinished_line_whole(
    local_user: CommandUser,
) -> None:
    job_id = local_user.submit(
        """
        import os, time
        print("whole line", flush=True)
        print("first half", end=" ", flush=True)
        while not os.path.exists("leave"):
            time.sleep(0.01)
        print("second half")
        raise SystemExit(5)
        """
    )
    following = local_user.start("logs", "-f", "--tail", "5", job_id)
    local_user.wait_for_output(following, "whole line")
    assert following.poll() is None
    local_user.path("leave").touch()
    assert following.wait(TEST_TIMEOUT) == 5
    out, err = local_user.output_of(following)
    assert out == "whole line\nfirst half second half\n"
    assert re.search(r"^clusterjob: job \S+ FAILED: rank", err, re.MULTILINE)


def test_cancel_ends_job_of_run_in_another_terminal(local_user: CommandUser) -> None:
    running = local_user.start(
        "run", "--nodes", "2", local_user.script(SLEEPER), until=("up0", "up1")
    )
    job_id = local_user.only_job()["id"]
    done = local_user("cancel", job_id)
    assert (done.stdout, done.stderr) == ("", f"clusterjob: job {job_id} is cancelled\n")
    assert running.wait(TEST_TIMEOUT) == 143
    assert "CANCELLED" in local_user.output_of(running)[1]
    job = local_user.only_job()
    assert (job["state"], job["exit_code"], job["failure"]) == ("CANCELLED", 143, None)
    assert "had ended already" in local_user("cancel", job_id).stderr


# -- interruptions ---------------------------------------------------------------------------------


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
        ("run", "jinja2"),
        ("submit", "clusterjob.backends.local.backend"),
        ("list", "clusterjob.core.records"),
        ("launch", "clusterjob.node.launch"),
    ],
)
def test_ctrl_c_during_startup_prints_no_traceback(
    local_user: CommandUser, tmp_path: Path, command: str, module: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTER)
    path = f"{tmp_path}:{os.environ['PYTHONPATH']}"
    variables = os.environ | {"PYTHONPATH": path, "INTERRUPT_AT": module}
    program = [] if command == "list" else [local_user.script("")]
    process = local_user.start(command, *program, env=variables)
    assert process.wait(TEST_TIMEOUT) == 130
    assert "Traceback" not in local_user.output_of(process)[1]
    assert len(local_user.output_of(process)[1].splitlines()) <= 1


@pytest.mark.parametrize("how", ["fork", "exec", "shell"])
def test_ctrl_c_raises_keyboard_interrupt_in_each_rank(local_user: CommandUser, how: str) -> None:
    script = local_user.script("""
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
    running = local_user.start("run", "--nodes", "2", "--grace", "60", *program)
    local_user.wait_for_output(running, "up", count=2)
    running.send_signal(signal.SIGINT)
    assert running.wait(TEST_TIMEOUT) == 130
    assert sorted(local_user.output_of(running)[0].splitlines()) == [
        f"[{rank}] {line} {rank}" for rank in (0, 1) for line in ("saved", "up")
    ]
    assert "interrupting" in local_user.output_of(running)[1]
    assert PACKAGE not in local_user.output_of(running)[1]
    job = local_user.only_job()
    assert (job["state"], job["reason"]) == ("CANCELLED", "cancelled")


def test_second_ctrl_c_kills_slow_workers(local_user: CommandUser) -> None:
    script = local_user.script("""
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
        print("up")
        while True:
            time.sleep(0.05)
    """)
    running = local_user.start("run", "--grace", "1000", script)
    local_user.wait_for_output(running, "up")
    running.send_signal(signal.SIGINT)
    local_user.wait_for_output(running, "interrupted")
    time.sleep(0.6)  # two signals within 0.5 s count as one keystroke
    running.send_signal(signal.SIGINT)
    assert running.wait(TEST_TIMEOUT) == 130
    assert PACKAGE not in local_user.output_of(running)[1]


@pytest.mark.parametrize("command", ["submit --follow", "logs -f"])
def test_ctrl_c_while_following_logs_does_not_cancel_job(
    local_user: CommandUser, command: str
) -> None:
    program = (
        local_user.script(SLEEPER) if command.startswith("submit") else local_user.submit(SLEEPER)
    )
    watching = local_user.start(*command.split(), program)
    local_user.wait_for_output(watching, "line of 0")
    watching.send_signal(signal.SIGINT)
    assert watching.wait(TEST_TIMEOUT) == 130
    assert PACKAGE not in local_user.output_of(watching)[1]
    job = local_user.only_job()
    assert job["state"] == "RUNNING"
    local_user("cancel", job["id"])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_killed_run_leaves_no_processes(local_user: CommandUser, number: signal.Signals) -> None:
    script = local_user.script(
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + textwrap.dedent(SLEEPER)
    )
    running = local_user.start("run", "--nodes", "2", script, until=("up0", "up1"))
    running.send_signal(number)
    running.wait(TEST_TIMEOUT)
    wait_for_no_processes(END_TIMEOUT)
    job = local_user.only_job()
    assert job["state"] == "CANCELLED"
    assert job["reason"] == "the command that ran the job is gone"


def test_run_killed_during_setup_leaves_no_processes(local_user: CommandUser) -> None:
    setup = 'touch "in$CLUSTERJOB_NODE_RANK"; sleep 1000'
    running = local_user.start(
        "run", "--nodes", "2", "--setup", setup, local_user.script(""), until=("in0", "in1")
    )
    running.kill()
    running.wait(TEST_TIMEOUT)
    wait_for_no_processes(END_TIMEOUT)
    assert local_user.only_job()["state"] in ("CANCELLED", "LOST")


# -- usage errors ----------------------------------------------------------------------------------

THIS_PYTHON = ["submit", "--python", sys.executable]
FILES = {
    "script.py": "",
    "broken.py": "print(1)\ndef f(:\n",
    "folder/broken.py": "  x\ny",
    "train.sh": "#!/bin/bash\necho hello\n",
    "unquoted.j2": "#!/bin/bash\n\ncd {{ workdir }}\n",
    "pyproject.toml": "[project]\nname = 'x'\n",
}
SSH = ["--hosts", "gpu1.invalid"]
LOGIN = ["submit", "--login", "login1.invalid"]
USAGE = {
    "no script": (
        ["submit", "scirpt.py"],
        "the script 'scirpt.py' does not exist",
        "did you mean script.py?",
    ),
    "a shell script": (["run", "train.sh"], "'train.sh' is not a Python script", "-- ./train.sh"),
    "nothing": (["run"], "nothing to run", "SCRIPT"),
    "nodes 0": (["submit", "--nodes", "0", "script.py"], "--nodes 0: the least", ""),
    "bad memory": (
        ["submit", "--mem", "12 potatoes", "script.py"],
        "'12 potatoes' is not a memory size",
        "64G",
    ),
    "bad duration": (
        ["submit", "--time", "1 fortnight", "script.py"],
        "'1 fortnight' is not a duration",
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
    "workdir": (["submit", "--workdir", "nowhere", "script.py"], "nowhere' does not exist", ""),
    "home of unknown user": (
        ["submit", "--workdir", "~nobody-of-this-name/x", "script.py"],
        "nobody-of-this-name",
        "",
    ),
    "start": (["submit", "--start", "spwan", "script.py"], "start is 'spwan'", "fork"),
    "metrics port": (
        ["submit", "--metrics-port", "70000", "script.py"],
        "--metrics-port 70000: must be from 1 to 65535",
        "--help",
    ),
    "metrics port without metrics": (
        ["submit", "--metrics-port", "9", "--no-metrics", "script.py"],
        "--metrics-port and --no-metrics exclude each other",
        "--help",
    ),
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
    "unquoted": (
        ["submit", "--template", "unquoted.j2", "script.py"],
        "unquoted.j2, line 3: the value",
        "sh",
    ),
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
    "duplicate host": (
        ["submit", "--hosts", "a,b,a", "script.py"],
        "the host a is named twice",
        "--nproc-per-node 2",
    ),
    "unknown verb": (["sbumit", "script.py"], "No such command 'sbumit'", "--help"),
    "verb of another program": (["kill", "x"], "there is no command kill", "`clusterjob cancel`"),
    "unknown mode": (["run", "--preflight=maybe", "script.py"], "maybe", ""),
    "option of the agent": (
        ["render", "--cluster", "slurm", "--launcher", "srun", "--preflight", "script.py"],
        "--preflight needs clusterjob's agent",
        "",
    ),
    "no value": (["submit", "--nodes"], "'--nodes' requires an argument", "--help"),
    "no id": (["exec"], "Missing argument", "--help"),
    "no job": (["logs", "-f"], "no job is recorded", "`clusterjob submit train.py`"),
    "tail": (["logs", "x", "--tail", "-1"], "--tail", "--help"),
    "wrong seconds of hosts": (
        ["hosts", *SSH, "--set", "connect_timeout=abc"],
        "connect_timeout: 'abc' is not a number of seconds",
        "--help",
    ),
    "wrong seconds for a login host": (
        [*LOGIN, "--set", "connect_timeout=abc", "script.py"],
        "connect_timeout: 'abc' is not a number of seconds",
        "--help",
    ),
    "unknown option of hosts": (
        ["hosts", *SSH, "--set", "conect_timeout=3"],
        "unknown option 'conect_timeout' for the ssh cluster (--set)",
        "the options are ssh_config, connect_timeout",
    ),
    "partition of hosts": (
        ["render", *SSH, "--partition", "gpu", "script.py"],
        "unknown option 'partition' for the ssh cluster (--partition or --set)",
        "ssh_config",
    ),
    "relative home": (
        ["render", *SSH, "--set", "remote_home=jobs", "script.py"],
        "remote_home: 'jobs' is not an absolute path",
        "/scratch/me",
    ),
    "relative home of hosts": (
        ["hosts", *SSH, "--set", "remote_home=jobs"],
        "remote_home: 'jobs' is not an absolute path",
        "/scratch/me",
    ),
    "hosts twice": (
        ["render", *SSH, "--hostfile", "hosts", "script.py"],
        "--hosts and --hostfile are both given",
        "only one",
    ),
    "hosts of hosts twice": (
        ["hosts", *SSH, "--hostfile", "hosts"],
        "--hosts and --hostfile are both given",
        "only one",
    ),
    "too few hosts": (
        ["submit", *SSH, "--nodes", "3", "script.py"],
        "--nodes 3: there are only 1 hosts",
        "lower --nodes",
    ),
    "array on hosts": (
        ["submit", *SSH, "--array", "0-3", "script.py"],
        "the ssh cluster has no --array",
        "--cluster slurm",
    ),
    "until done on this machine": (
        ["submit", "--cluster", "local", "--until-done", "script.py"],
        "the local cluster has no --until-done: it would not queue the job again",
        "--max-restarts N starts the workers again",
    ),
    "until done on hosts": (
        ["submit", *SSH, "--until-done", "script.py"],
        "the ssh cluster has no --until-done: it would not queue the job again",
        "--max-restarts N starts the workers again",
    ),
    "script outside of the sent directory": (
        ["submit", *SSH, "--workdir", "folder", "../script.py"],
        "the script '../script.py' is outside of the sent directory",
        "--workdir",
    ),
    "hosts of another cluster": (
        ["submit", "--cluster", "slurm", *SSH, "script.py"],
        "the slurm cluster takes no hosts",
        "--cluster ssh",
    ),
    "hosts of this machine": (
        ["submit", "--cluster", "local", *SSH, "script.py"],
        "the local cluster takes no hosts",
        "--cluster ssh",
    ),
    "login of this machine": (
        ["render", "--cluster", "local", "--login", "x", "script.py"],
        "the local cluster has no --login",
        "--cluster slurm",
    ),
    "login of hosts": (
        ["render", "--cluster", "ssh", *SSH, "--login", "x", "script.py"],
        "the ssh cluster has no --login",
        "--cluster slurm",
    ),
    "two login hosts": (
        ["submit", "--login", "a,b", "script.py"],
        "--login 'a,b' names 2 hosts",
        "name one",
    ),
    "neither true nor false": (
        ["submit", "--cluster", "slurm", "--set", "need_torch=never", "script.py"],
        "need_torch: 'never' is neither true nor false",
        "--help",
    ),
    "doctor of no cluster": (
        ["doctor", "--cluster", "nowhere"],
        "there is no cluster 'nowhere'",
        "use one of local, slurm, ssh, mlp",
    ),
    "doctor with a wrong number": (
        ["doctor", "--nodes", "none"],
        "'none' is not a whole number",
        "--help",
    ),
    "doctor of a script": (["doctor", "script.py"], "unexpected extra argument", "--help"),
    "unknown shell": (
        ["completion", "csh"],
        "there is no completion for 'csh'",
        "use bash, zsh, fish",
    ),
    "top without a terminal": (["top"], "top needs a terminal", "status --watch` prints lines"),
    "init without a terminal": (["init"], "there is no terminal to ask", "--yes takes what"),
    "trust of nothing": (["trust", "--yes"], "no usable project configuration file", "toml"),
    "trust of another file": (
        ["trust", "pyproject.toml", "--yes"],
        "clusterjob: error: ",
        "",
    ),
    "trust of no file": (["trust", "nowhere.toml", "--yes"], "nowhere.toml", ""),
}


@pytest.mark.parametrize("case", USAGE)
def test_bad_arguments_are_refused_with_one_line_and_hint(
    local_user: CommandUser,
    case: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The many cases run in this process, which is faster than a process each."""
    args, message, hint = USAGE[case]
    write_tree(local_user.directory, **FILES)
    monkeypatch.chdir(local_user.directory)
    assert command_line(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert not local_user.home.exists(), "nothing was started and nothing was written"
    first, second = err.splitlines()
    assert first.startswith("clusterjob: error: ")
    assert message in first
    assert second.startswith("  hint: ")
    assert hint in second


def test_verbose_option_shows_cause_of_error(local_user: CommandUser) -> None:
    local_user.path("clusterjob.toml").write_text("[defaults\n")
    process = local_user.start("-v", "config")
    assert process.wait(TEST_TIMEOUT) == 2
    assert "TOMLDecodeError" in local_user.output_of(process)[1]


# -- env and config --------------------------------------------------------------------------------


def test_env_shows_detected_environment(
    local_user: CommandUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTERJOB_NNODES", "2")
    monkeypatch.setenv("CLUSTERJOB_NODE_RANK", "1")
    assert "conflict: CLUSTERJOB_MASTER_ADDR is not set" in local_user("env", code=1).stdout
    monkeypatch.setenv("CLUSTERJOB_MASTER_ADDR", "host0")
    table = local_user("env").stdout
    assert re.search(r"^nnodes\s+2\s+CLUSTERJOB_NNODES$", table, re.MULTILINE)


def test_config_shows_origin_of_each_setting(
    local_user: CommandUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = local_user.path("clusterjob.toml")
    path.write_text(
        "cluster = 'lab'\n[defaults]\nmem = '1G'\n"
        "[clusters.lab]\nbackend = 'local'\nworkdir = '/tmp'\nsetup = 'true'\n"
        "secret = ['TOKEN', 'KEY=k']\nenv = {A = '1', B = '2'}\n"
    )
    monkeypatch.setenv("CLUSTERJOB_NODES", "3")
    monkeypatch.delenv("CLUSTERJOB_PYTHON")  # a setting of all tests here
    result = json.loads(local_user("config", "--json").stdout)
    assert (result["schema"], result["cluster"], result["backend"]) == (1, "lab", "local")
    lab = f"{path}: [clusters.lab]"
    assert result["settings"] == {
        "nodes": {"value": 3, "origin": "CLUSTERJOB_NODES"},
        "mem": {"value": "1G", "bytes": 1024**3, "origin": f"{path}: [defaults] mem"},
        "workdir": {"value": "/tmp", "origin": f"{lab} workdir"},
        "setup": {"value": ["true"], "origin": f"{lab} setup"},
        "secret": {"value": ["TOKEN", f"KEY={path.parent}/k"], "origin": f"{lab} secret"},
        "env": {"value": {"A": "1", "B": "2"}, "origin": f"{lab} env"},
    }
    shown = local_user("config").stdout
    assert re.search(r"^nodes\s+3\s+CLUSTERJOB_NODES$", shown, re.MULTILINE)
    for part in ("mem       1G ", f" TOKEN, KEY={path.parent}/k ", " A=1, B=2 "):
        assert " ".join(part.split()) in " ".join(shown.split())


# -- help, closed stdout and encodings -------------------------------------------------------------


def test_help_goes_to_stdout(local_user: CommandUser) -> None:
    done = local_user("--help")
    assert done.stderr == ""
    assert re.search(r"^  submit +\S", done.stdout, re.MULTILINE)
    done = local_user(code=2)
    assert done.stdout == ""
    assert "Usage" in done.stderr
    assert re.fullmatch(r"clusterjob \d+\.\d+\.\d+\S*\n", local_user("--version").stdout)


@pytest.mark.parametrize(
    "args",
    [["list"], ["status", "--json"], ["logs", "script"], ["render", "script.py"], ["--help"]],
)
def test_closed_stdout_prints_no_error(local_user: CommandUser, args: list[str]) -> None:
    local_user("run", local_user.script("print('hello')"))
    read, write = os.pipe()
    os.close(read)  # each write fails with EPIPE
    try:
        done = subprocess.run(
            [*CLUSTERJOB, *args], check=False, cwd=local_user.directory, stdout=write,
            stderr=subprocess.PIPE, text=True, timeout=TEST_TIMEOUT,
        )  # fmt: skip
    finally:
        os.close(write)
    assert done.stderr == ""


def test_output_not_encodable_in_terminal_is_shown(
    local_user: CommandUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = local_user(
        "run",
        "--name",
        "schneemann ☃",
        local_user.script("import os; os.write(1, '☃ \\n'.encode() + b'\\xff\\n')"),
    )
    assert len(done.stdout.splitlines()) == 2
    assert local_user.only_job()["name"] == "schneemann ☃"


def test_arguments_that_are_not_utf8_are_rendered(local_user: CommandUser) -> None:
    for options in ((), ("--json",)):
        shown = local_user("render", *options, local_user.script(""), "\udcff").stdout
        assert "script.py" in shown


def test_workers_start_by_exec_with_one_notice_if_import_torch_fails(
    local_user: CommandUser,
) -> None:
    why = "starts its workers by exec: import torch failed: libcudart.so.99 is not there"
    local_user.path("torch").mkdir()
    local_user.script("raise ImportError('libcudart.so.99 is not there')", "torch/__init__.py")
    script = local_user.script("""
        import os, time
        print("ran", flush=True)
        while not os.path.exists("leave"):
            time.sleep(0.01)
    """)
    setup = f"export PYTHONPATH='{local_user.directory}':$PYTHONPATH"
    running = local_user.start("run", "--setup", setup, script)
    local_user.wait_for_output(running, "ran")
    wait_until(lambda: why in local_user.output_of(running)[1], TEST_TIMEOUT)
    local_user.path("leave").touch()
    assert running.wait(TEST_TIMEOUT) == 0, (
        "a store that cannot be served is no reason to stop a job that wants none"
    )
    assert local_user.output_of(running)[1].count(why) == 1


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        ("", ">&-", 0),
        ("export PYTHONINSPECT=1;", "", 0),
        ("mkdir gone; cd gone; rmdir ../gone;", "2>&1", 2),
    ],
    ids=["closed stdout", "inspect", "deleted directory"],
)
def test_run_in_an_odd_shell(local_user: CommandUser, before: str, after: str, code: int) -> None:
    script = local_user.script("open('ran', 'w'); print('ran')")
    command = f"{before} {shlex.join(CLUSTERJOB)} run --cluster local {script} {after}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=local_user.directory, capture_output=True, text=True,
        check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert (local_user.directory / "ran").exists() == (code == 0)
    assert ("the working directory was deleted" in done.stdout) == (code == 2)


def test_workers_keep_the_link_in_pwd(local_user: CommandUser) -> None:
    (local_user.directory / "real").mkdir()
    (local_user.directory / "link").symlink_to("real")
    run = shlex.join([*CLUSTERJOB, "run", "--cluster", "local", "--", "sh", "-c", "echo $PWD"])
    done = subprocess.run(
        ["bash", "-c", f"cd link && {run}"], cwd=local_user.directory, capture_output=True,
        text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.stdout == f"{local_user.directory}/link\n", done.stderr
