"""Jobs of the local backend, with real agents and workers: status, output, failures, cancel."""

from __future__ import annotations

import os
import shutil
import subprocess
import textwrap
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launching import HOST, new_folder
from procs import (
    TEST_TIMEOUT,
    alive,
    kill_all,
    own_processes,
    wait_for_no_processes,
    wait_until,
)
from verdicts import wait_for_verdict

from clusterjob.backends.local.backend import LocalBackend
from clusterjob.core import job_settings, jobs, polling
from clusterjob.core.plans import Plan, PlannedCommand
from clusterjob.core.records import Handle, Record, Records
from clusterjob.errors import ClusterJobError, SubmitError
from clusterjob.node.program import Program
from clusterjob.node.system import processes
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import FailureKind, JobState

END_TIMEOUT = 15.0  # seconds; much longer than a job needs to end, because the machine may be busy

# Each rank creates a file, then sleeps for ever.
SLEEPER = """
    import os, pathlib, time
    pathlib.Path(f"up{os.environ['RANK']}").touch()
    time.sleep(1000)
"""


WAIT = "while [ ! -e go ]; do sleep 0.02; done"  # a setup line
# Each rank creates a file, then waits for the file `leave`.
WAITER = """
    import os, pathlib, time
    pathlib.Path(f"up{os.environ['RANK']}").touch()
    while not os.path.exists("leave"):
        time.sleep(0.01)
"""


class Project:
    """A directory to submit jobs from; their interpreter starts fast, without torch to import."""

    def __init__(self, directory: Path, python: str) -> None:
        self.directory = directory
        self.path("python").symlink_to(python)

    def path(self, name: str) -> Path:
        return self.directory / name

    def plan(self, text: str, *args: str, **flags: Any) -> Plan:
        """Return the plan of a script with this text."""
        self.path("script.py").write_text(textwrap.dedent(text))
        settings = job_settings.resolve({"nodes": 2, **flags}, "local", directory=self.directory)
        program = Program("script", "script.py", args=args)
        spec = job_settings.make_spec(program, settings, directory=self.directory)
        return jobs.plan(spec, settings)

    def submit(self, text: str, *args: str, until: Iterable[str] = (), **flags: Any) -> Record:
        """Submit a script as a detached job; return its record when the files ``until`` exist."""
        record = jobs.submit(self.plan(text, *args, **flags), "local", detach=True)
        self.wait_for(*until)
        return record

    def wait_for(self, *names: str) -> None:
        wait_until(
            lambda: all(self.path(name).exists() for name in names), TEST_TIMEOUT, f"files {names}"
        )


def agents_of(record: Record) -> list[int]:
    """Return the pids of a job's agents, ordered by node rank."""
    return [agent["pid"] for agent in record.handle.data["agents"]]


@pytest.fixture
def project(tmp_path: Path, plain_python: str) -> Project:
    directory = new_folder(tmp_path / "work")
    return Project(directory, plain_python)


@pytest.fixture(autouse=True)
def _no_job_survives() -> Iterator[None]:
    yield
    try:
        wait_for_no_processes(END_TIMEOUT)
    finally:
        kill_all(own_processes())


# -- jobs that succeed -----------------------------------------------------------------------------


def test_job_is_pending_then_running_then_succeeded(project: Project) -> None:
    record = project.submit(WAITER, setup=WAIT)
    before = polling.status(record)
    assert (before.state, before.verdict, before.started_at) == (JobState.PENDING, None, None)
    project.path("go").touch()
    project.wait_for("up0", "up1")
    during = polling.status(record)
    assert (during.state, during.verdict, during.restarts) == (JobState.RUNNING, None, 0)
    project.path("leave").touch()
    verdict = wait_for_verdict(record)
    assert (verdict.state, verdict.exit_code, verdict.failure) == (JobState.SUCCEEDED, 0, None)
    assert verdict.started_at is not None
    assert verdict.started_at == during.started_at
    assert record.submitted_at <= str(verdict.started_at) <= str(verdict.ended_at)
    assert Records().find(record.job_id).end == verdict.to_json(), (
        "the record keeps the end, whatever becomes of the directory"
    )


def test_agents_run_the_commands_of_the_plan_in_sessions_of_their_own(project: Project) -> None:
    """In addition there are only the token and the files and directories of the agents."""
    plan = project.plan("", "a b", "-x", env=["A=1 2"], setup=WAIT)
    assert not plan.job_dir.parent.exists(), "a plan alone leaves no trace"
    record = jobs.submit(plan, "local", detach=True)
    names = {path.name for path in plan.job_dir.iterdir()} - {file.path.name for file in plan.files}
    assert names == {"token", "logs", "ends", "detached", "code", "code.list", "tree"}
    for pid, command in zip(agents_of(record), plan.commands, strict=True):
        # During exec, after Popen returns, it is empty for a moment.
        argv = wait_until(Path(f"/proc/{pid}/cmdline").read_bytes, END_TIMEOUT)
        assert argv.decode().split("\0")[:-1] == list(command.argv)
        assert os.getsid(pid) == pid, "it is no part of the submitter's session"
    project.path("go").touch()
    assert wait_for_verdict(record).state is JobState.SUCCEEDED


@pytest.mark.parametrize(
    ("flags", "code", "reason"),
    [
        ({"setup": ("true", "echo 'no such module' >&2; (exit 7)")}, 7, "no such module"),
        ({"setup": "echo 'no such module' >&2; exit 3"}, 3, "no such module"),
        ({"setup": "nosuchcommand"}, 127, "setup line failed: nosuchcommand"),
        ({"setup": '[ "$CLUSTERJOB_NODE_RANK" != 1 ]', "join_timeout": "60"}, 1, "node 1 (host "),
        ({"setup": "if then"}, 2, "syntax error"),
        # With a setup line, which could provide the interpreter, submit does not check it.
        (
            {"python": "/nonexistent/py thon", "setup": "true"},
            127,
            "there is no interpreter /nonex",
        ),
    ],
    ids=["its code", "exit", "no such command", "on one node", "syntax error", "no interpreter"],
)
def test_job_whose_script_fails_before_its_agents_names_the_line(
    project: Project, flags: dict[str, Any], code: int, reason: str
) -> None:
    verdict = wait_for_verdict(project.submit(SLEEPER, **flags), END_TIMEOUT)
    assert (verdict.state, verdict.exit_code) == (JobState.FAILED, code), verdict.text()
    assert (verdict.failure.host, verdict.failure.kind) == (HOST, FailureKind.LAUNCH)
    assert reason in verdict.text()


# -- setup lines and start of the interpreter ------------------------------------------------------


def test_interpreter_path_may_be_relative_to_workdir(project: Project) -> None:
    assert wait_for_verdict(project.submit("", python="./python")).state is JobState.SUCCEEDED


def test_deleted_workdir_fails_job(project: Project) -> None:
    workdir = new_folder(project.path("wörk 'dir'\n2"))
    (workdir / "script.py").touch()
    plan = project.plan("", workdir=str(workdir), snapshot=False)
    shutil.rmtree(workdir)
    verdict = wait_for_verdict(jobs.submit(plan, "local", detach=True), END_TIMEOUT)
    assert (verdict.state, verdict.exit_code) == (JobState.FAILED, 1)
    assert f"the working directory {sanitize(str(workdir))} cannot be entered" in verdict.text()


def test_failed_start_of_one_agent_stops_other_agents_and_leaves_no_files(project: Project) -> None:
    plan = project.plan(SLEEPER)
    plan = replace(
        plan, commands=(plan.commands[0], PlannedCommand(("/nonexistent/bash",), node_rank=1))
    )
    with pytest.raises(SubmitError, match="an agent cannot be started: No such file"):
        jobs.submit(plan, "local", detach=True)
    assert own_processes() == []
    assert not plan.job_dir.exists()
    assert Records().all() == []


# -- killed processes ------------------------------------------------------------------------------


@pytest.mark.parametrize("node_rank", [0, 1])
def test_node_killed_during_setup_leaves_no_processes(project: Project, node_rank: int) -> None:
    """The shell of the node is killed, its setup command is not.

    The agent of the other node waits at most for the join timeout.
    """
    line = f'[ "$CLUSTERJOB_NODE_RANK" != {node_rank} ] || {{ touch in; sleep 1000; }}'
    record = project.submit(SLEEPER, setup=line, join_timeout="2", until=("in",))
    kill_all([agents_of(record)[node_rank]])
    wait_for_no_processes(END_TIMEOUT)
    assert wait_for_verdict(record).state in (JobState.FAILED, JobState.LOST)


# -- cancel ----------------------------------------------------------------------------------------


def test_job_can_be_cancelled_at_any_time_of_start(project: Project) -> None:
    """Each pause ends at another step between the shell's first line and the running worker."""
    states = {}
    for milliseconds in (0, 15, 60, 150, 400):
        record = project.submit(SLEEPER)
        time.sleep(milliseconds / 1000)
        jobs.cancel([record])
        states[milliseconds] = polling.status(record).state
        wait_for_no_processes(END_TIMEOUT)
    assert states == dict.fromkeys(states, JobState.CANCELLED)


def test_job_is_cancelled_during_setup_that_ignores_sigterm(project: Project) -> None:
    setup = 'trap "" TERM; touch "in$CLUSTERJOB_NODE_RANK"; sleep 1000'
    record = project.submit(SLEEPER, setup=setup, grace="0.3", until=("in0", "in1"))
    assert polling.status(record).state is JobState.PENDING
    jobs.cancel([record])
    wait_for_no_processes(END_TIMEOUT)
    assert polling.status(record).state is JobState.CANCELLED


# -- deleted directories and stale records ---------------------------------------------------------


def test_running_job_with_deleted_directory_is_cancelled(project: Project) -> None:
    record = project.submit(SLEEPER, until=("up0", "up1"))
    # rename is atomic; a writer could create files again during rmtree
    shutil.rmtree(record.job_dir.rename(project.path("deleted")))
    assert polling.status(record).state in (JobState.RUNNING, JobState.UNKNOWN)
    assert [was_running for _, was_running in jobs.cancel([record])] == [True]
    wait_for_no_processes(END_TIMEOUT)
    assert polling.status(record).state in (JobState.CANCELLED, JobState.LOST)


def test_ended_job_with_deleted_directory_keeps_recorded_state(project: Project) -> None:
    known, unasked = project.submit(""), project.submit("")
    assert wait_for_verdict(known).state is JobState.SUCCEEDED
    # An exiting process loses its environment, which marks it, before it becomes a zombie.
    wait_until(lambda: not any(map(alive, agents_of(unasked))), END_TIMEOUT)
    for record in (known, unasked):
        shutil.rmtree(record.job_dir)
    assert polling.status(Records().find(known.job_id)).state is JobState.SUCCEEDED
    assert polling.status(Records().find(unasked.job_id)).state is JobState.LOST


def recorded(directory: Path, pid: int, **changed: Any) -> Record:
    """Return the record of a job whose only agent has this pid."""
    agent = {"node_rank": 0, "pid": pid, "ticks": changed.pop("ticks", processes.start_ticks(pid))}
    data = {"agents": [agent], "boot_id": processes.boot_id(), "host": HOST} | changed
    return Record(
        "x-222222", "x", cluster="local", backend="local", job_dir=directory, nodes=1,
        submitted_at="2026-01-01T00:00:00.000Z", spec={"grace": 0.1},
        handle=Handle("local", "x-222222", data=data),
    )  # fmt: skip


@pytest.mark.parametrize(
    "changed",
    [{"boot_id": "00000000-0000-0000-0000-000000000000"}, {"ticks": 1}, {"ticks": 0}],
    ids=["of a previous boot", "of another process", "unknown start"],
)
def test_reused_pid_is_not_taken_for_agent(tmp_path: Path, changed: dict[str, Any]) -> None:
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as bystander:
        stale = recorded(tmp_path, bystander.pid, **changed)
        Records().save(stale)
        assert polling.status(stale).state is JobState.LOST
        assert [was_running for _, was_running in jobs.cancel([stale])] == [False]
        assert bystander.poll() is None
        bystander.kill()


def test_job_of_another_host_is_unknown_and_not_cancelled(tmp_path: Path) -> None:
    """Several hosts can share the home directory that contains the record."""
    record = recorded(tmp_path, os.getpid(), host="elsewhere")
    Records().save(record)
    status = polling.status(record)
    assert (status.state, status.verdict) == (JobState.UNKNOWN, None)
    assert "elsewhere" in status.reason
    with pytest.raises(ClusterJobError, match="job x-222222 runs on elsewhere") as caught:
        jobs.cancel([record])
    assert caught.value.hint == "cancel it there"
    assert list(tmp_path.iterdir()) == []


def test_status_during_submission_is_pending_and_does_not_overwrite_handle(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is written before its handle."""
    seen = []
    real = LocalBackend.submit

    def submit(self: LocalBackend, plan: Plan) -> Handle:
        handle = real(self, plan)
        seen.extend(polling.statuses(Records().all()))
        return handle

    monkeypatch.setattr(LocalBackend, "submit", submit)
    record = project.submit(WAITER)
    [(stale, status)] = seen
    assert status.state is JobState.PENDING
    project.wait_for("up0", "up1")
    polling.statuses([stale])  # another terminal evaluates the record that it read earlier
    again = Records().find(record.job_id)
    assert (again.handle, again.end) == (record.handle, None)
    project.path("leave").touch()
    assert wait_for_verdict(record).state is JobState.SUCCEEDED
