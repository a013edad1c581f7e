"""Jobs of the local backend, with real agents and workers: status, output, failures, cancel."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from procs import (
    TEST_TIMEOUT,
    alive,
    children,
    command_line,
    kill_all,
    own_processes,
    wait_for_no_processes,
    wait_until,
)
from verdicts import wait_for_verdict

from clusterjob.backends import base
from clusterjob.backends.local.backend import LocalBackend
from clusterjob.core import job_settings, jobs, polling
from clusterjob.core.config import Settings
from clusterjob.core.plans import Plan, PlannedCommand
from clusterjob.core.records import Handle, Record, Records
from clusterjob.errors import ClusterJobError, JobNotFound, SpecError, SubmitError
from clusterjob.node.program import Program
from clusterjob.node.system import processes
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import JobState

HOST = socket.gethostname()
END_TIMEOUT = 15.0  # seconds; much longer than a job needs to end, because the machine may be busy
LOST_TIMEOUT = 10.0  # seconds until no process is left of a job that has lost an agent

# Each rank creates a file, then sleeps for ever.
SLEEPER = """
    import os, pathlib, time
    pathlib.Path(f"up{os.environ['RANK']}").touch()
    time.sleep(1000)
"""


class Project:
    """A directory to submit jobs from.

    Its interpreter starts fast because it has no torch to import.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.python = directory / "python"
        self.python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')
        self.python.chmod(0o755)

    def path(self, name: str) -> Path:
        return self.directory / name

    def script(self, text: str, name: str = "script.py") -> str:
        self.path(name).write_text(textwrap.dedent(text))
        return name

    def plan(self, program: Program, **flags: Any) -> Plan:
        flags = {"nodes": 2, "python": str(self.python), **flags}
        settings: Settings = job_settings.resolve(
            {key: value for key, value in flags.items() if value is not None},
            "local",
            directory=self.directory,
        )
        return jobs.plan(
            job_settings.make_spec(program, settings, directory=self.directory), settings
        )

    def submit(self, text: str, *args: str, **flags: Any) -> Record:
        """Submit a script with this text as a detached job, like ``clusterjob submit``."""
        return jobs.submit(
            self.plan(Program("script", self.script(text), args=args), **flags),
            "local",
            detach=True,
        )

    def wait_for(self, *names: str, timeout: float = TEST_TIMEOUT) -> None:
        wait_until(
            lambda: all(self.path(name).exists() for name in names), timeout, f"the files {names}"
        )


def agents_of(record: Record) -> list[int]:
    """Return the pids of a job's agents, ordered by node rank."""
    assert record.handle is not None
    return [
        agent["pid"]
        for agent in sorted(record.handle.data["agents"], key=lambda agent: agent["node_rank"])
    ]


def text_of(record: Record) -> str:
    """Return the output of all agents and workers of a job."""
    return "\n".join(
        path.read_text(errors="replace")
        for path in sorted((record.job_dir / "logs").rglob("*"))
        if path.is_file()
    )


@pytest.fixture
def project(tmp_path: Path) -> Project:
    directory = tmp_path / "work"
    directory.mkdir()
    return Project(directory)


@pytest.fixture(autouse=True)
def _no_job_survives() -> Iterator[None]:
    yield
    try:
        wait_for_no_processes(END_TIMEOUT)
    finally:
        kill_all(own_processes())


# -- jobs that succeed -----------------------------------------------------------------------------


def test_job_is_pending_then_running_then_succeeded(project: Project) -> None:
    record = project.submit(
        """
        import os, pathlib, time
        pathlib.Path(f"up{os.environ['RANK']}").touch()
        while not os.path.exists("leave"):
            time.sleep(0.01)
        """,
        setup="while [ ! -e go ]; do sleep 0.02; done",
    )
    before = polling.status(record)
    assert (before.state, before.verdict, before.started_at) == (JobState.PENDING, None, None)
    project.path("go").touch()
    project.wait_for("up0", "up1")
    during = polling.status(record)
    assert (during.state, during.verdict, during.restarts) == (JobState.RUNNING, None, 0)
    assert Records().find(record.job_id).end is None
    project.path("leave").touch()
    verdict = wait_for_verdict(record)
    assert (verdict.state, verdict.exit_code, verdict.reason, verdict.failure) == (
        JobState.SUCCEEDED,
        0,
        "",
        None,
    )
    assert verdict.started_at == during.started_at
    assert record.submitted_at <= str(verdict.started_at) <= str(verdict.ended_at)
    assert Records().find(record.job_id).end == verdict.to_json(), (
        "the record keeps the end, whatever becomes of the directory"
    )
    wait_for_no_processes(END_TIMEOUT)


def test_submitted_files_and_commands_equal_plan(project: Project) -> None:
    """Files and commands are byte-identical to the plan.

    In addition there are only the token and the files and directories of the agents.
    """
    project.script("")
    plan = project.plan(
        Program("script", "script.py", args=("a b", "-x")),
        env=["A=1 2"],
        setup="while [ ! -e go ]; do sleep 0.02; done",
    )
    assert not plan.job_dir.parent.exists(), "a plan alone leaves no trace"
    record = jobs.submit(plan, "local", detach=True)
    for file in plan.files:
        assert file.path.read_bytes() == file.data
        assert stat.S_IMODE(file.path.stat().st_mode) == file.mode
    code = plan.job_dir / "tree"
    found = {
        str(path.relative_to(plan.job_dir))
        for path in plan.job_dir.rglob("*")
        if code not in path.parents
    }
    planned = {str(file.path.relative_to(plan.job_dir)) for file in plan.files}
    logs = {f"logs/node{node}{name}" for node in (0, 1) for name in ("", "/agent.log")}
    assert found == planned | logs | {
        "token", "logs", "ends", "detached", "code", "code.list", "tree"
    }  # fmt: skip
    for pid, command in zip(agents_of(record), plan.commands, strict=True):
        # During exec, after Popen returns, both are empty for a moment.
        wait_until(Path(f"/proc/{pid}/environ").read_bytes, END_TIMEOUT)
        assert Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1] == [
            word.encode() for word in command.argv
        ]
        environ = dict(
            entry.split(b"=", 1)
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if entry
        )
        assert environ.items() >= {
            (name.encode(), value.encode()) for name, value in command.env.items()
        }
        assert os.getsid(pid) == pid, "it is no part of the submitter's session"
    project.path("go").touch()
    assert wait_for_verdict(record).state is JobState.SUCCEEDED


def test_plan_text_contains_each_file_and_command(project: Project) -> None:
    project.script("")
    plan = project.plan(Program("script", "script.py"))
    text = plan.text()
    for file in plan.files:
        assert f"### {file.path} ({file.mode:04o})\n{file.text().rstrip()}\n" in text
    for command in plan.commands:
        argv = shlex.split(text.splitlines()[-len(plan.commands) :][command.node_rank])
        assert argv == [*(f"{name}={value}" for name, value in command.env.items()), *command.argv]
    assert plan.text() == text
    assert json.loads(json.dumps(plan.to_json()))["files"][0]["text"] == plan.files[0].data.decode()


def test_follow_returns_lines_by_rank_and_stream(project: Project) -> None:
    record = project.submit(
        """
        import os, sys
        print("out of", os.environ["RANK"])
        print("err of", os.environ["RANK"], file=sys.stderr)
        print("no end", end="")
        """,
        nproc_per_node="2",
    )
    lines: list[Any] = []
    verdict = polling.follow(
        record, lambda batches: lines.extend(chain.from_iterable(batches)), progress=lambda _: None
    )
    assert verdict.state is JobState.SUCCEEDED
    for rank in range(4):
        own = [(line.node_rank, line.stream, line.text) for line in lines if line.rank == rank]
        assert sorted(own) == sorted(
            (rank // 2, *rest)
            for rest in (("out", f"out of {rank}"), ("err", f"err of {rank}"), ("out", "no end"))
        )


def test_concurrent_jobs_are_separate(project: Project) -> None:
    script = 'import os; print(os.environ["WORLD_SIZE"], os.environ["CLUSTERJOB_JOB_ID"])'
    records = [project.submit(script, nproc_per_node=str(count)) for count in (1, 2, 1, 2)]
    for record, count in zip(records, (1, 2, 1, 2), strict=True):
        assert wait_for_verdict(record).state is JobState.SUCCEEDED
        for rank in range(2 * count):
            out = record.job_dir / "logs" / f"node{rank // count}" / f"rank{rank}.out"
            assert out.read_text() == f"{2 * count} {record.job_id}\n"


def test_job_submitted_inside_job_ignores_variables_of_outer_job(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "5", "MASTER_ADDR": "192.0.2.1",
        "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_ERROR_FILE": "x",
        "CLUSTERJOB_JOB_ID": "outer", "CLUSTERJOB_NNODES": "9", "CLUSTERJOB_NODE_RANK": "7",
        "CLUSTERJOB_TOKEN": "outer", "CLUSTERJOB_ATTEMPT": "3", "CLUSTERJOB_REPORT_FD": "3:1",
        "CLUSTERJOB_JOB_DIR": "/nonexistent",
    }  # fmt: skip
    for name, value in foreign.items():
        monkeypatch.setenv(name, value)
    record = project.submit("""
        import json, os
        names = (
            "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "CLUSTERJOB_JOB_ID",
            "CLUSTERJOB_ATTEMPT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE",
        )
        print(json.dumps({name: os.environ.get(name) for name in names}))
    """)
    assert wait_for_verdict(record).state is JobState.SUCCEEDED
    seen = json.loads((record.job_dir / "logs" / "node1" / "rank1.out").read_text())
    assert seen == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "CLUSTERJOB_JOB_ID": record.job_id,
        "CLUSTERJOB_ATTEMPT": "0",
        "TORCHELASTIC_RUN_ID": record.job_id,
        "TORCHELASTIC_ERROR_FILE": None,
    }


def test_hostile_names_arguments_and_variables_arrive_unchanged(
    project: Project, special_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTERJOB_HOME", str(special_path / "home"))
    hostile = [
        "",
        " ",
        "a b",
        "'",
        '"',
        "\\",
        "$(touch pwned)",
        "`touch pwned`",
        "new\nline\n",
        "-m",
        "--",
        "*",
        "~",
        "!x",
        "☃",
        "\udcff",
        "a=b",
    ]
    directory = special_path / "wörk 'dir'"
    directory.mkdir()
    hostile_project = Project(directory)
    name = "-s'c\"r i\np☃t.py"
    hostile_project.script(
        """
        import json, os, sys
        variables = {name: os.environ[name] for name in os.environ if name.startswith("H_")}
        print(json.dumps([sys.argv[1:], __file__, os.getcwd(), variables]))
        """,
        name,
    )
    env = [f"H_{index}={value}" for index, value in enumerate(hostile)]
    plan = hostile_project.plan(
        Program("script", name, args=tuple(hostile)),
        env=env,
        name="a 'job' \"named\" $(touch pwned) ☃",
        setup="H_SETUP='a b'; export H_SETUP",
    )
    record = jobs.submit(plan, "local", detach=True)
    verdict = wait_for_verdict(record)
    assert verdict.state is JobState.SUCCEEDED, verdict.text()
    for rank in (0, 1):
        arguments, file, cwd, variables = json.loads(
            (record.job_dir / "logs" / f"node{rank}" / f"rank{rank}.out").read_text()
        )
        assert arguments == hostile
        assert Path(file) == record.job_dir / "code" / name
        assert cwd == str(directory)
        assert variables == {f"H_{index}": value for index, value in enumerate(hostile)} | {
            "H_SETUP": "a b"
        }
    assert not list(special_path.rglob("pwned"))


def test_job_files_are_private_and_token_is_only_in_its_file(
    project: Project,
) -> None:
    old = os.umask(0)
    try:
        record = project.submit(SLEEPER, env=["A=1"])
        project.wait_for("up0", "up1")
        token = (record.job_dir / "token").read_text()
        assert len(token) >= 32
        tokens = [
            path
            for path in record.job_dir.rglob("*")
            if path.is_file() and token.encode() in path.read_bytes()
        ]
        assert tokens == [record.job_dir / "token"]
        assert token not in json.dumps(Records().find(record.job_id).to_json())
        commands = [command_line(pid) for pid in own_processes()]
        assert commands
        assert [command for command in commands if token in command] == []
        assert stat.S_IMODE((record.job_dir / "token").stat().st_mode) == 0o600
        for directory in (
            record.job_dir,
            *(
                path
                for path in record.job_dir.rglob("*")
                if path.is_dir() and not path.is_symlink() and path.parent.name != "tree"
            ),
        ):
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700, directory
        assert stat.S_IMODE((Records().directory / f"{record.job_id}.json").stat().st_mode) == 0o600
        jobs.cancel([record])
        assert token not in text_of(record)
    finally:
        os.umask(old)


# -- setup lines and start of the interpreter ------------------------------------------------------


def test_workers_get_setup_and_env_variables(project: Project) -> None:
    record = project.submit(
        "import os; print(os.environ['FROM_ENV'], os.environ['FROM_SETUP'], "
        "os.environ['PYTHONPATH'].split(':')[2:])",
        env=["FROM_ENV=it's", "PYTHONPATH=/mine"],
        setup=('export FROM_SETUP="$FROM_ENV set" # a comment', "cat", "true &"),
    )
    assert wait_for_verdict(record).state is JobState.SUCCEEDED, text_of(record)
    assert (
        record.job_dir / "logs" / "node0" / "rank0.out"
    ).read_text() == "it's it's set ['/mine']\n"


@pytest.mark.parametrize("line", ["", "# only a comment", "  "])
def test_empty_setup_line_is_accepted(project: Project, line: str) -> None:
    record = project.submit("", setup=(line,))
    assert wait_for_verdict(record).state is JobState.SUCCEEDED, text_of(record)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        pytest.param("echo 'no such module' >&2; false", 1, id="fails"),
        pytest.param("echo 'no such module' >&2; (exit 7)", 7, id="its code"),
        pytest.param("echo 'no such module' >&2; exit 3", 3, id="exit"),
        pytest.param("echo 'no such module' >&2; nosuchcommand", 127, id="no such command"),
    ],
)
def test_failing_setup_line_fails_job(project: Project, line: str, code: int) -> None:
    begin = time.monotonic()
    record = project.submit(SLEEPER, setup=("true", line))
    verdict = wait_for_verdict(record)
    print(f"a failing setup line ended the job after {time.monotonic() - begin:.2f} s")
    assert (verdict.state, verdict.exit_code) == (JobState.FAILED, code), verdict.text()
    assert verdict.failure is not None
    assert (verdict.failure.rank, verdict.failure.host, verdict.failure.exit_code) == (
        None,
        HOST,
        code,
    )
    assert "setup line failed" in verdict.reason
    assert "no such module" in verdict.text()
    wait_for_no_processes(END_TIMEOUT)


def test_setup_line_with_syntax_error_fails_job(project: Project) -> None:
    verdict = wait_for_verdict(project.submit(SLEEPER, setup="if then"))
    assert verdict.state is JobState.FAILED
    assert verdict.exit_code != 0
    assert "syntax error" in verdict.text()


@pytest.mark.parametrize(
    "line", ['[ "$CLUSTERJOB_NODE_RANK" != 1 ]', '[ "$CLUSTERJOB_NODE_RANK" != 1 ] || exit 1']
)
def test_setup_line_failing_on_one_node_fails_job(project: Project, line: str) -> None:
    record = project.submit(SLEEPER, setup=line, join_timeout="60")
    verdict = wait_for_verdict(record, END_TIMEOUT)
    assert (verdict.state, verdict.exit_code) == (JobState.FAILED, 1)
    assert verdict.failure is not None
    assert (verdict.failure.node_rank, verdict.failure.host) == (1, HOST)
    assert "setup line failed" in verdict.reason
    wait_for_no_processes(END_TIMEOUT)


@pytest.mark.parametrize("nodes", [1, 2])
def test_missing_interpreter_fails_job(project: Project, nodes: int) -> None:
    # with a setup line, which could provide the interpreter, submit does not check it
    record = project.submit(SLEEPER, nodes=nodes, python="/nonexistent/py thon", setup="true")
    verdict = wait_for_verdict(record, END_TIMEOUT)
    assert (verdict.state, verdict.exit_code) == (JobState.FAILED, 127)
    assert verdict.reason.startswith("node 0 (host ")
    assert "there is no interpreter /nonexistent/py thon" in verdict.reason


def test_interpreter_path_may_be_relative_to_workdir(project: Project) -> None:
    assert wait_for_verdict(project.submit("", python="./python")).state is JobState.SUCCEEDED


def test_deleted_workdir_fails_job(project: Project) -> None:
    workdir = project.path("wörk 'dir'\n2")
    workdir.mkdir()
    (workdir / "script.py").touch()
    plan = project.plan(Program("script", "script.py"), workdir=str(workdir), snapshot=False)
    shutil.rmtree(workdir)
    verdict = wait_for_verdict(jobs.submit(plan, "local", detach=True), END_TIMEOUT)
    assert (verdict.state, verdict.exit_code) == (JobState.FAILED, 1)
    assert f"the working directory {sanitize(str(workdir))} cannot be entered" in verdict.text()


def test_deleted_script_fails_job(project: Project) -> None:
    project.script("")
    plan = project.plan(Program("script", "script.py"))
    project.path("script.py").unlink()
    verdict = wait_for_verdict(jobs.submit(plan, "local", detach=True), END_TIMEOUT)
    assert verdict.state is JobState.FAILED
    assert "script.py" in verdict.text()


def test_failed_start_of_agents_leaves_no_files(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.script("")
    plan = project.plan(Program("script", "script.py"))
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SubmitError, match="an agent cannot be started"):
        jobs.submit(plan, "local", detach=True)
    assert not plan.job_dir.exists()
    assert Records().all() == []


def test_failed_start_of_one_agent_stops_other_agents(project: Project) -> None:
    project.script(SLEEPER)
    plan = project.plan(Program("script", "script.py"))
    plan = replace(
        plan, commands=(plan.commands[0], PlannedCommand(("/nonexistent/bash",), node_rank=1))
    )
    with pytest.raises(SubmitError, match="No such file"):
        jobs.submit(plan, "local", detach=True)
    assert own_processes() == []
    assert not plan.job_dir.exists()
    with pytest.raises(JobNotFound):
        Records().find(plan.job_id)


# -- GPUs ------------------------------------------------------------------------------------------


def test_job_with_too_few_gpus_runs_on_cpu(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    project.script(
        "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']), os.environ['WORLD_SIZE'])"
    )
    plan = project.plan(Program("script", "script.py"), gpus_per_node="2")
    assert len(plan.notes) == 1
    assert "0 of the 4 GPUs" in plan.notes[0]
    assert "CPU" in plan.notes[0]
    record = jobs.submit(plan, "local", detach=True)
    assert wait_for_verdict(record).state is JobState.SUCCEEDED
    for rank in range(4):
        assert (
            record.job_dir / "logs" / f"node{rank // 2}" / f"rank{rank}.out"
        ).read_text() == "'' 4\n"


def test_missing_required_gpus_are_refused(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    project.script("")
    with pytest.raises(SpecError, match="0 of the 4 GPUs") as caught:
        project.plan(Program("script", "script.py"), gpus_per_node="2", require_gpus=True)
    assert "--no-require-gpus" in caught.value.hint


def test_unknown_backend_option_is_refused(project: Project) -> None:
    project.script("")
    with pytest.raises(SpecError, match="partition"):
        project.plan(Program("script", "script.py"), set=["partition=gpu"])


def test_job_directory_with_colon_is_refused(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTERJOB_HOME", str(project.path("a:b")))
    project.script("")
    with pytest.raises(SpecError, match="colon"):
        project.plan(Program("script", "script.py"))


# -- failures of workers ---------------------------------------------------------------------------

ENDS = {
    "raise": ("raise ValueError('boom')", 1, None),
    "exit": ("sys.exit(3)", 3, None),
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL"),
    "segv": ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "SIGSEGV"),
}


# Rank 1 runs on the coordinator's node, rank 2 on the other node. Each kind of end occurs on one
# of the two nodes.
@pytest.mark.parametrize(("end", "guilty"), list(zip(ENDS, (1, 2, 1, 2), strict=True)))
def test_dead_worker_ends_both_nodes(project: Project, end: str, guilty: int) -> None:
    statement, code, signal_name = ENDS[end]
    record = project.submit(
        f"""
        import os, pathlib, signal, sys, time
        rank = os.environ["RANK"]
        pathlib.Path("up" + rank).touch()
        if rank == "{guilty}":
            while not all(os.path.exists(f"up{{other}}") for other in range(4)):
                time.sleep(0.005)
            print("these are", "my last words", sep="\\n", file=sys.stderr, flush=True)
            pathlib.Path("moment.new").write_text(str(time.monotonic()))
            os.rename("moment.new", "moment")
            {statement}
        time.sleep(1000)
        """,
        nproc_per_node="2",
    )
    project.wait_for("moment")
    died = float(project.path("moment").read_text())
    wait_for_no_processes(END_TIMEOUT)
    took = time.monotonic() - died
    verdict = wait_for_verdict(record, END_TIMEOUT)
    print(f"{end} of rank {guilty}: nothing was left of two nodes {took:.2f} s after it")
    assert took < END_TIMEOUT
    assert (verdict.state, verdict.exit_code) == (JobState.FAILED, code)
    failure = verdict.failure
    assert failure is not None
    assert (failure.rank, failure.local_rank, failure.node_rank, failure.host) == (
        guilty,
        guilty % 2,
        guilty // 2,
        HOST,
    )
    assert (failure.exit_code, failure.signal) == (code, signal_name)
    assert verdict.consequences == ()
    assert (
        f"FAILED: rank {guilty} (node {guilty // 2}, local rank {guilty % 2}, host {HOST})"
        in verdict.text()
    )
    assert "| these are\n  | my last words" in verdict.text()


def test_plain_torch_script_forms_process_group_on_two_nodes(project: Project) -> None:
    """The script is plain torch: store, devices and ranks come only from environment variables."""
    record = project.submit(
        """
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(3) * (dist.get_rank() + 1)
        dist.all_reduce(total)
        print(dist.get_rank(), dist.get_world_size(), total.tolist())
        dist.destroy_process_group()
        """,
        nproc_per_node="2",
        python=sys.executable,
    )
    verdict = wait_for_verdict(record)
    assert verdict.state is JobState.SUCCEEDED, verdict.text()
    for rank in range(4):
        assert (
            record.job_dir / "logs" / f"node{rank // 2}" / f"rank{rank}.out"
        ).read_text() == f"{rank} 4 [10.0, 10.0, 10.0]\n"


def test_verdict_of_failed_process_group_names_root_cause(project: Project) -> None:
    record = project.submit(
        """
        import os, pathlib, time
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        for step in range(10**9):
            dist.all_reduce(torch.ones(4))
            if step == 5 and dist.get_rank() == 3:
                pathlib.Path("moment").write_text(str(time.monotonic()))
                raise ValueError("the root cause")
        """,
        nproc_per_node="2",
        python=sys.executable,
    )
    verdict = wait_for_verdict(record)
    wait_for_no_processes(END_TIMEOUT)
    took = time.monotonic() - float(project.path("moment").read_text())
    print(f"nothing was left {took:.2f} s after the exception")
    assert (verdict.state, verdict.exit_code) == (JobState.FAILED, 1)
    assert verdict.failure is not None
    assert verdict.failure.rank == 3
    assert "ValueError: the root cause" in verdict.reason


def test_failed_workers_are_restarted(project: Project) -> None:
    record = project.submit(
        """
        import os, sys
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("attempt", attempt, os.environ["TORCHELASTIC_MAX_RESTARTS"])
        sys.exit(9 if os.environ["RANK"] == "1" and attempt == "0" else 0)
        """,
        max_restarts="2",
    )
    verdict = wait_for_verdict(record)
    assert (verdict.state, verdict.exit_code, verdict.restarts) == (JobState.SUCCEEDED, 0, 1)
    assert polling.status(Records().find(record.job_id)).restarts == 1
    lines: list[Any] = []
    polling.follow(
        record, lambda batches: lines.extend(chain.from_iterable(batches)), progress=lambda _: None
    )
    assert [line.text for line in lines if line.rank == 1] == ["attempt 0 2", "attempt 1 2"]


def test_job_fails_after_last_restart(project: Project) -> None:
    verdict = wait_for_verdict(project.submit("raise SystemExit(6)", max_restarts="1"))
    assert (verdict.state, verdict.exit_code, verdict.restarts) == (JobState.FAILED, 6, 1)
    assert "after 1 restart" in verdict.text()


def test_time_limit_ends_job(project: Project) -> None:
    record = project.submit(SLEEPER, time="1s", grace="0.5")
    verdict = wait_for_verdict(record)
    assert (verdict.state, verdict.exit_code) == (JobState.FAILED, 124)
    assert "time limit of 1 s" in verdict.reason
    wait_for_no_processes(END_TIMEOUT)


# -- killed processes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    ["agent 0", "agent 1", "forkserver 0", "forkserver 1", "worker 0", "worker 1", "all agents"],
)
def test_killed_process_of_job_leaves_no_processes(project: Project, kind: str) -> None:
    record = project.submit(SLEEPER + "\n", nproc_per_node="2")
    project.wait_for(*(f"up{rank}" for rank in range(4)))
    agents = agents_of(record)
    forkservers = [child for agent in agents for child in children(agent)]
    assert len(forkservers) == 2
    workers = [children(forkserver)[1:] for forkserver in forkservers]  # not the output's process
    assert [len(group) for group in workers] == [2, 2]
    what, _, node = kind.partition(" ")
    node_rank = int(node) if node.isdigit() else 0
    targets = {
        "agent": [agents[node_rank]],
        "forkserver": [forkservers[node_rank]],
        "worker": [workers[node_rank][0]],
        "all": agents,
    }[what]
    kill_all(targets)
    took = wait_for_no_processes(LOST_TIMEOUT)
    verdict = wait_for_verdict(record, END_TIMEOUT)
    print(
        f"kill -9 of {kind}: nothing was left {took:.2f} s after it; "
        f"{verdict.text().splitlines()[0]}"
    )
    if what == "worker":
        assert (verdict.state, verdict.exit_code) == (JobState.FAILED, 137)
        assert verdict.failure is not None
        assert (verdict.failure.node_rank, verdict.failure.local_rank, verdict.failure.signal) == (
            node_rank,
            0,
            "SIGKILL",
        )
    else:
        assert verdict.state in (JobState.FAILED, JobState.LOST)
        assert verdict.exit_code != 0
        assert verdict.reason
    if kind == "agent 1":
        assert verdict.failure is not None
        assert verdict.failure.node_rank == 1
        assert str(agents[1]) in verdict.reason


@pytest.mark.parametrize("node_rank", [0, 1])
def test_node_killed_during_setup_leaves_no_processes(project: Project, node_rank: int) -> None:
    """The shell of the node is killed, its setup command is not.

    The agent of the other node waits at most for the join timeout.
    """
    line = f'[ "$CLUSTERJOB_NODE_RANK" != {node_rank} ] || {{ touch in; sleep 1000; }}'
    record = project.submit(SLEEPER, setup=line, join_timeout="2")
    project.wait_for("in")
    kill_all([agents_of(record)[node_rank]])
    print(
        f"nothing was left after {wait_for_no_processes(LOST_TIMEOUT):.2f} s,"
        " with a join timeout of 2 s"
    )
    verdict = wait_for_verdict(record, END_TIMEOUT)
    assert verdict.state in (JobState.FAILED, JobState.LOST)
    assert verdict.exit_code != 0


def test_killed_agent_leaves_no_workers_that_ignore_sigterm(project: Project) -> None:
    """The workers and their children, which are in their own sessions, ignore SIGTERM."""
    record = project.submit(
        """
        import os, pathlib, signal, subprocess, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        pathlib.Path(f"up{os.environ['RANK']}").touch()
        time.sleep(1000)
        """
    )
    project.wait_for("up0", "up1")
    kill_all([agents_of(record)[0]])
    print(f"nothing was left after {wait_for_no_processes(LOST_TIMEOUT):.2f} s")
    assert wait_for_verdict(record).state in (JobState.FAILED, JobState.LOST)


# -- cancel ----------------------------------------------------------------------------------------


def test_running_job_is_cancelled_once(project: Project) -> None:
    record = project.submit(SLEEPER)
    project.wait_for("up0", "up1")
    begin = time.monotonic()
    assert [was_running for _, was_running in jobs.cancel([record])] == [True]
    wait_for_no_processes(END_TIMEOUT)
    print(f"cancel took {time.monotonic() - begin:.2f} s")
    status = polling.status(record)
    assert status.state is JobState.CANCELLED
    assert status.verdict is not None
    assert (status.verdict.exit_code, status.verdict.failure) == (143, None)
    assert [was_running for _, was_running in jobs.cancel([record])] == [False]
    assert polling.status(Records().find(record.job_id)).state is JobState.CANCELLED


def test_cancelled_workers_have_grace_to_save(project: Project) -> None:
    record = project.submit(
        """
        import os, pathlib, signal, sys, time
        def save(*_):
            time.sleep(0.5)
            pathlib.Path(f"saved{os.environ['RANK']}").touch()
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        pathlib.Path(f"up{os.environ['RANK']}").touch()
        while True:
            time.sleep(0.1)
        """
    )
    project.wait_for("up0", "up1")
    jobs.cancel([record])
    assert project.path("saved0").exists()
    assert project.path("saved1").exists()
    assert polling.status(record).state is JobState.CANCELLED


def test_cancelled_worker_that_ignores_sigterm_is_killed_after_grace(project: Project) -> None:
    record = project.submit(
        """
        import os, pathlib, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path(f"up{os.environ['RANK']}").touch()
        time.sleep(1000)
        """,
        grace="0.5",
    )
    project.wait_for("up0", "up1")
    begin = time.monotonic()
    jobs.cancel([record])
    took = time.monotonic() - begin + wait_for_no_processes(END_TIMEOUT)
    print(f"workers that ignore SIGTERM were gone {took:.2f} s after cancel, with a grace of 0.5 s")
    assert 0.4 < took < END_TIMEOUT
    assert polling.status(record).state is JobState.CANCELLED


def test_job_can_be_cancelled_at_any_time_of_start(project: Project) -> None:
    """Each pause ends at another step between the shell's first line and the running worker."""
    states = {}
    for milliseconds in (0, 5, 15, 30, 60, 100, 150, 250, 400):
        record = project.submit(SLEEPER)
        time.sleep(milliseconds / 1000)
        jobs.cancel([record])
        status = polling.status(record)
        states[milliseconds] = (
            str(status.state),
            status.verdict.exit_code if status.verdict else None,
        )
        wait_for_no_processes(END_TIMEOUT)
    assert states == dict.fromkeys(states, ("CANCELLED", 143))


def test_job_is_cancelled_during_setup(project: Project) -> None:
    record = project.submit(SLEEPER, setup='touch "in$CLUSTERJOB_NODE_RANK"; sleep 1000')
    project.wait_for("in0", "in1")
    assert polling.status(record).state is JobState.PENDING
    begin = time.monotonic()
    assert [was_running for _, was_running in jobs.cancel([record])] == [True]
    wait_for_no_processes(END_TIMEOUT)
    print(f"cancel during setup took {time.monotonic() - begin:.2f} s")
    status = polling.status(record)
    assert status.state is JobState.CANCELLED, status
    assert status.verdict is not None
    assert status.verdict.exit_code == 143


def test_cancelled_setup_line_that_ignores_sigterm_is_killed(
    project: Project,
) -> None:
    record = project.submit(
        SLEEPER, setup='trap "" TERM; touch "in$CLUSTERJOB_NODE_RANK"; sleep 1000', grace="0.3"
    )
    project.wait_for("in0", "in1")
    jobs.cancel([record])
    wait_for_no_processes(END_TIMEOUT)
    assert polling.status(record).state is JobState.CANCELLED


def test_ended_job_is_not_cancelled(project: Project) -> None:
    record = project.submit("")
    wait_for_verdict(record)
    assert [was_running for _, was_running in jobs.cancel([record])] == [False]
    assert polling.status(record).state is JobState.SUCCEEDED


# -- deleted directories and stale records ---------------------------------------------------------


def test_running_job_with_deleted_directory_is_cancelled(project: Project) -> None:
    record = project.submit(SLEEPER)
    project.wait_for("up0", "up1")
    # rename is atomic; a writer could create files again during rmtree
    shutil.rmtree(record.job_dir.rename(project.path("deleted")))
    assert polling.status(record).state in (JobState.RUNNING, JobState.UNKNOWN), (
        "it was started: it cannot be pending"
    )
    assert [was_running for _, was_running in jobs.cancel([record])] == [True]
    wait_for_no_processes(END_TIMEOUT)
    status = polling.status(record)
    assert status.state in (JobState.CANCELLED, JobState.LOST)
    assert status.verdict is not None
    assert status.verdict.exit_code != 0


def test_verdict_of_job_with_deleted_directory_is_kept(project: Project) -> None:
    record = project.submit(
        """
        import os, pathlib, time
        pathlib.Path(f"up{os.environ['RANK']}").touch()
        while not os.path.exists("leave"):
            time.sleep(0.01)
        """
    )
    project.wait_for("up0", "up1")
    # rename is atomic; a writer could create files again during rmtree
    shutil.rmtree(record.job_dir.rename(project.path("deleted")))
    project.path("leave").touch()
    wait_for_no_processes(END_TIMEOUT)
    verdict = wait_for_verdict(record)
    assert (verdict.state, verdict.exit_code) == (JobState.SUCCEEDED, 0)
    assert "its directory cannot be written: No such file or directory" in verdict.reason


def test_ended_job_with_deleted_directory_keeps_recorded_state(project: Project) -> None:
    known, unasked = project.submit(""), project.submit("")
    assert wait_for_verdict(known).state is JobState.SUCCEEDED
    wait_until((unasked.job_dir / "result.json").exists, TEST_TIMEOUT)
    # An exiting process loses its environment, which marks it, before it becomes a zombie.
    wait_until(lambda: not any(map(alive, agents_of(unasked))), END_TIMEOUT)
    shutil.rmtree(known.job_dir)
    shutil.rmtree(unasked.job_dir)
    assert polling.status(Records().find(known.job_id)).state is JobState.SUCCEEDED, (
        "its end was noted in the record"
    )
    assert polling.status(Records().find(unasked.job_id)).state is JobState.LOST
    assert (
        polling.follow(
            Records().find(known.job_id), lambda _: None, progress=lambda _: None
        ).exit_code
        == 0
    )


def test_job_of_previous_boot_is_lost(project: Project) -> None:
    record = project.submit(SLEEPER)
    project.wait_for("up0", "up1")
    handle = record.handle
    assert handle is not None
    stale = replace(
        record,
        handle=replace(
            handle, data={**handle.data, "boot_id": "00000000-0000-0000-0000-000000000000"}
        ),
    )
    agents = agents_of(record)
    assert polling.status(stale).state is JobState.LOST
    assert [was_running for _, was_running in jobs.cancel([stale])] == [False]
    assert all(alive(agent) for agent in agents), (
        "the processes with these pids belong to another job on this boot"
    )
    jobs.cancel([record])


@pytest.mark.parametrize("ticks", ["another process's", "none"])
def test_reused_pid_is_not_taken_for_agent(project: Project, ticks: str) -> None:
    record = project.submit("")
    assert wait_for_verdict(record).state is JobState.SUCCEEDED
    bystander = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        own = processes.start_ticks(bystander.pid)
        assert own is not None
        assert record.handle is not None
        agents = [
            {"node_rank": 0, "pid": bystander.pid, "ticks": own - 1 if ticks != "none" else 0}
        ]
        # a living agent would write the missing result again
        wait_until(lambda: not any(alive(agent) for agent in agents_of(record)), TEST_TIMEOUT)
        (record.job_dir / "result.json").unlink()
        stale = replace(
            record,
            end=None,
            handle=replace(record.handle, data={**record.handle.data, "agents": agents}),
        )
        assert polling.status(stale).state is JobState.LOST
        jobs.cancel([stale])
        assert bystander.poll() is None
        assert alive(bystander.pid)
    finally:
        bystander.kill()
        bystander.wait()


def test_job_of_another_host_is_unknown_and_not_cancelled(project: Project, tmp_path: Path) -> None:
    """Several hosts can share the home directory that contains the record."""
    agents = [{"node_rank": 0, "pid": os.getpid(), "ticks": processes.start_ticks(os.getpid())}]
    handle = Handle(
        "local",
        "x-222222",
        data={"agents": agents, "boot_id": processes.boot_id(), "host": "elsewhere"},
    )
    job_dir = tmp_path / "job"
    job_dir.mkdir()
    record = Record(
        "x-222222",
        "x",
        cluster="local",
        backend="local",
        job_dir=job_dir,
        nodes=1,
        submitted_at="2026-01-01T00:00:00.000Z",
        spec={"grace": 0.1},
        handle=handle,
    )
    Records().save(record)
    status = polling.status(record)
    assert (status.state, status.verdict) == (JobState.UNKNOWN, None)
    assert "elsewhere" in status.reason
    with pytest.raises(ClusterJobError, match="job x-222222 runs on elsewhere") as caught:
        jobs.cancel([record])
    assert caught.value.hint == "cancel it there"
    assert list(job_dir.iterdir()) == []


class PolledDuringSubmit(LocalBackend):
    """The local backend; it calls `poll` before a submission returns its handle."""

    def __init__(self, poll: Callable[[], object]) -> None:
        super().__init__()
        self.poll = poll
        self.seen: Any = None

    def submit(self, plan: Plan) -> Handle:
        handle = super().submit(plan)
        self.seen = self.poll()
        return handle


def test_job_during_submission_is_pending(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is written before its handle."""
    listing = [sys.executable, "-m", "clusterjob", "list", "--json"]
    backend = PolledDuringSubmit(
        lambda: (
            subprocess.run(listing, capture_output=True, timeout=TEST_TIMEOUT, check=True).stdout
        )
    )
    monkeypatch.setitem(base._loaded, "local", backend)
    record = project.submit(SLEEPER)
    project.wait_for("up0", "up1")
    jobs.cancel([record])
    assert [job["state"] for job in json.loads(backend.seen)["jobs"]] == ["PENDING"]


def test_status_of_stale_record_does_not_overwrite_handle(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = PolledDuringSubmit(lambda: Records().all())
    monkeypatch.setitem(base._loaded, "local", backend)
    record = project.submit(SLEEPER)
    project.wait_for("up0", "up1")
    polling.statuses(backend.seen)  # another terminal evaluates the records that it read earlier
    again = Records().find(record.job_id)
    jobs.cancel([record])
    assert again.handle == record.handle, (
        "without it the job can no longer be asked after or cancelled"
    )
    assert again.end is None


def test_job_is_outside_process_group_of_submitter(project: Project) -> None:
    record = project.submit(SLEEPER)
    project.wait_for("up0", "up1")
    own_group = os.getpgrp()
    groups = {os.getpgid(pid) for pid in own_processes()}
    assert groups
    assert own_group not in groups
    jobs.cancel([record])
    assert polling.status(record).reason == "cancelled"
