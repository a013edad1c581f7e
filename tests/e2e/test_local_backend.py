"""Jobs on this machine as the backend runs them: real agents, real workers, what is seen of them
and what faults make of them.
"""

from __future__ import annotations

import contextlib
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
    PATIENCE,
    alive,
    below,
    command_line,
    kill_one_by_one,
    nothing_left,
    own_marked,
    stat_of,
    wait_until,
)

from clusterjob.backends.local.backend import LocalBackend
from clusterjob.core import jobs
from clusterjob.core.config import Settings
from clusterjob.core.plans import Plan, PlannedCommand
from clusterjob.core.records import Handle, Record, Records
from clusterjob.errors import ClusterJobError, JobNotFound, SpecError, SubmitError
from clusterjob.node.program import Program
from clusterjob.node.system import processes
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import JobState, Verdict

HOST = socket.gethostname()
PROMPT = 15.0  # seconds; many times what a job needs to end, for two cores that others keep busy
LOST = 10.0  # seconds until nothing is left of a job that has lost an agent

# Names itself by a file, then waits for ever.
SLEEPER = """
    import os, pathlib, time
    pathlib.Path(f"up{os.environ['RANK']}").touch()
    time.sleep(1000)
"""


class Place:
    """A directory that jobs are submitted from, with an interpreter that starts at once: it finds
    no torch to import.
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
        settings: Settings = jobs.settle(
            {key: value for key, value in flags.items() if value is not None},
            "local",
            directory=self.directory,
        )
        return jobs.plan(jobs.make_spec(program, settings, directory=self.directory), settings)

    def submit(self, text: str, *args: str, **flags: Any) -> Record:
        """Submit a script that is given by its text; as ``clusterjob submit`` does, the job is left
        to itself.
        """
        return jobs.submit(
            self.plan(Program("script", self.script(text), args=args), **flags),
            "local",
            detach=True,
        )

    def wait_for(self, *names: str, timeout: float = PATIENCE) -> None:
        wait_until(
            lambda: all(self.path(name).exists() for name in names), timeout, f"the files {names}"
        )


def end_of(record: Record, timeout: float = PATIENCE) -> Verdict:
    """Return the verdict of a job; fail the test when there is none in time."""
    verdict = wait_until(
        lambda: jobs.status(record).verdict, timeout, f"the end of {record.job_id}"
    )
    assert verdict is not None
    return verdict


def agents_of(record: Record) -> list[int]:
    """Return the pids of a job's agents, node by node."""
    assert record.handle is not None
    return [
        agent["pid"]
        for agent in sorted(record.handle.data["agents"], key=lambda agent: agent["node_rank"])
    ]


def children(pid: int) -> list[int]:
    return [candidate for candidate in below(pid) if stat_of(candidate)[1:2] == [str(pid)]]


def text_of(record: Record) -> str:
    """Return all that the job's agents and workers wrote."""
    return "\n".join(
        path.read_text(errors="replace")
        for path in sorted((record.job_dir / "logs").rglob("*"))
        if path.is_file()
    )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    directory = tmp_path / "work"
    directory.mkdir()
    return Place(directory)


@pytest.fixture(autouse=True)
def _no_job_survives() -> Iterator[None]:
    yield
    try:
        nothing_left(PROMPT)
    finally:
        kill_one_by_one(own_marked())


# -- a job that goes well ------------------------------------------------------------------------------------------------


def test_a_job_is_pending_then_running_then_over(place: Place) -> None:
    record = place.submit(
        """
        import os, pathlib, time
        pathlib.Path(f"up{os.environ['RANK']}").touch()
        while not os.path.exists("leave"):
            time.sleep(0.01)
        """,
        setup="while [ ! -e go ]; do sleep 0.02; done",
    )
    before = jobs.status(record)
    assert (before.state, before.verdict, before.started_at) == (JobState.PENDING, None, None)
    place.path("go").touch()
    place.wait_for("up0", "up1")
    during = jobs.status(record)
    assert (during.state, during.verdict, during.restarts) == (JobState.RUNNING, None, 0)
    assert Records().find(record.job_id).end is None
    place.path("leave").touch()
    verdict = end_of(record)
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
    nothing_left(PROMPT)


def test_what_was_planned_is_what_is_done(place: Place) -> None:
    """Byte for byte, files and commands alike; beside them only the token and the directories that
    the agents fill.
    """
    place.script("")
    plan = place.plan(
        Program("script", "script.py", args=("a b", "-x")),
        env=["A=1 2"],
        setup="while [ ! -e go ]; do sleep 0.02; done",
    )
    assert not plan.job_dir.parent.exists(), "a plan alone leaves no trace"
    record = jobs.submit(plan, "local", detach=True)
    for file in plan.files:
        assert file.path.read_bytes() == file.data
        assert stat.S_IMODE(file.path.stat().st_mode) == file.mode
    found = {str(path.relative_to(plan.job_dir)) for path in plan.job_dir.rglob("*")}
    planned = {str(file.path.relative_to(plan.job_dir)) for file in plan.files}
    logs = {f"logs/node{node}{name}" for node in (0, 1) for name in ("", "/agent.log")}
    assert found == planned | logs | {"token", "logs", "ends", "detached"}
    for pid, command in zip(agents_of(record), plan.commands, strict=True):
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
    place.path("go").touch()
    assert end_of(record).state is JobState.SUCCEEDED


def test_the_text_of_a_plan_holds_each_file_and_each_command(place: Place) -> None:
    place.script("")
    plan = place.plan(Program("script", "script.py"))
    text = plan.text()
    for file in plan.files:
        assert f"### {file.path} ({file.mode:04o})\n{file.text().rstrip()}\n" in text
    for command in plan.commands:
        words = shlex.split(text.splitlines()[-len(plan.commands) :][command.node_rank])
        assert words == [*(f"{name}={value}" for name, value in command.env.items()), *command.argv]
    assert plan.text() == text
    assert json.loads(json.dumps(plan.to_json()))["files"][0]["text"] == plan.files[0].data.decode()


def test_output_is_followed_by_rank_and_stream(place: Place) -> None:
    record = place.submit(
        """
        import os, sys
        print("out of", os.environ["RANK"])
        print("err of", os.environ["RANK"], file=sys.stderr)
        print("no end", end="")
        """,
        nproc_per_node="2",
    )
    lines: list[Any] = []
    verdict = jobs.follow(
        record, lambda batches: lines.extend(chain.from_iterable(batches)), progress=lambda _: None
    )
    assert verdict.state is JobState.SUCCEEDED
    for rank in range(4):
        own = [(line.node_rank, line.stream, line.text) for line in lines if line.rank == rank]
        assert sorted(own) == sorted(
            (rank // 2, *rest)
            for rest in (("out", f"out of {rank}"), ("err", f"err of {rank}"), ("out", "no end"))
        )


def test_jobs_that_run_at_once_do_not_meet(place: Place) -> None:
    script = 'import os; print(os.environ["WORLD_SIZE"], os.environ["CLUSTERJOB_JOB_ID"])'
    records = [place.submit(script, nproc_per_node=str(count)) for count in (1, 2, 1, 2)]
    for record, count in zip(records, (1, 2, 1, 2), strict=True):
        assert end_of(record).state is JobState.SUCCEEDED
        for rank in range(2 * count):
            out = record.job_dir / "logs" / f"node{rank // count}" / f"rank{rank}.out"
            assert out.read_text() == f"{2 * count} {record.job_id}\n"


def test_a_job_from_inside_a_job_is_a_job_of_its_own(
    place: Place, monkeypatch: pytest.MonkeyPatch
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
    record = place.submit("""
        import json, os
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "CLUSTERJOB_JOB_ID", "CLUSTERJOB_ATTEMPT", "TORCHELASTIC_RUN_ID")
        print(json.dumps({name: os.environ.get(name) for name in (*names, "TORCHELASTIC_ERROR_FILE")}))
    """)
    assert end_of(record).state is JobState.SUCCEEDED
    seen = json.loads((record.job_dir / "logs" / "node1" / "rank1.out").read_text())
    assert seen == {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "CLUSTERJOB_JOB_ID": record.job_id, "CLUSTERJOB_ATTEMPT": "0",
        "TORCHELASTIC_RUN_ID": record.job_id, "TORCHELASTIC_ERROR_FILE": None,
    }  # fmt: skip


def test_hostile_names_arguments_and_variables_arrive_as_they_are(
    place: Place, weird_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTERJOB_HOME", str(weird_path / "home"))
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
    directory = weird_path / "wörk 'dir'"
    directory.mkdir()
    there = Place(directory)
    name = "-s'c\"r i\np☃t.py"
    there.script(
        """
        import json, os, sys
        print(json.dumps([sys.argv[1:], __file__, os.getcwd(), {name: os.environ[name] for name in os.environ if name.startswith("H_")}]))
        """,
        name,
    )
    env = [f"H_{index}={value}" for index, value in enumerate(hostile)]
    plan = there.plan(
        Program("script", name, args=tuple(hostile)),
        env=env,
        name="a 'job' \"named\" $(touch pwned) ☃",
        setup="H_SETUP='a b'; export H_SETUP",
    )
    record = jobs.submit(plan, "local", detach=True)
    verdict = end_of(record)
    assert verdict.state is JobState.SUCCEEDED, verdict.text()
    for rank in (0, 1):
        arguments, file, cwd, variables = json.loads(
            (record.job_dir / "logs" / f"node{rank}" / f"rank{rank}.out").read_text()
        )
        assert arguments == hostile
        assert Path(file) == directory / name
        assert cwd == str(directory)
        assert variables == {f"H_{index}": value for index, value in enumerate(hostile)} | {
            "H_SETUP": "a b"
        }
    assert not list(weird_path.rglob("pwned"))


def test_everything_of_a_job_is_its_owner_s_alone_and_the_token_is_nowhere_else(
    place: Place,
) -> None:
    old = os.umask(0)
    try:
        record = place.submit(SLEEPER, env=["A=1"])
        place.wait_for("up0", "up1")
        token = (record.job_dir / "token").read_text()
        assert len(token) >= 32
        tokens = [
            path
            for path in record.job_dir.rglob("*")
            if path.is_file() and token.encode() in path.read_bytes()
        ]
        assert tokens == [record.job_dir / "token"]
        assert token not in json.dumps(Records().find(record.job_id).to_json())
        assert not [pid for pid in own_marked() if token in command_line(pid)]
        assert stat.S_IMODE((record.job_dir / "token").stat().st_mode) == 0o600
        for directory in (
            record.job_dir,
            *(path for path in record.job_dir.rglob("*") if path.is_dir()),
        ):
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700, directory
        assert stat.S_IMODE((Records().directory / f"{record.job_id}.json").stat().st_mode) == 0o600
        jobs.cancel([record])
        assert token not in text_of(record)
    finally:
        os.umask(old)


# -- what happens before the interpreter ----------------------------------------------------------------------------------


def test_setup_lines_and_variables_reach_the_workers(place: Place) -> None:
    record = place.submit(
        "import os; print(os.environ['FROM_ENV'], os.environ['FROM_SETUP'], os.environ['PYTHONPATH'].split(':')[2:])",
        env=["FROM_ENV=it's", "PYTHONPATH=/mine"],
        setup=('export FROM_SETUP="$FROM_ENV set" # a comment', "cat", "true &"),
    )
    assert end_of(record).state is JobState.SUCCEEDED, text_of(record)
    assert (
        record.job_dir / "logs" / "node0" / "rank0.out"
    ).read_text() == "it's it's set ['/mine']\n"


@pytest.mark.parametrize("line", ["", "# only a comment", "  "])
def test_a_setup_line_that_says_nothing_does_nothing(place: Place, line: str) -> None:
    record = place.submit("", setup=(line,))
    assert end_of(record).state is JobState.SUCCEEDED, text_of(record)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        pytest.param("echo 'no such module' >&2; false", 1, id="fails"),
        pytest.param("echo 'no such module' >&2; (exit 7)", 7, id="its code"),
        pytest.param("echo 'no such module' >&2; exit 3", 3, id="exit"),
        pytest.param("echo 'no such module' >&2; nosuchcommand", 127, id="no such command"),
    ],
)
def test_a_setup_line_that_fails_fails_the_job(place: Place, line: str, code: int) -> None:
    begin = time.monotonic()
    record = place.submit(SLEEPER, setup=("true", line))
    verdict = end_of(record)
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
    nothing_left(PROMPT)


def test_a_setup_line_that_is_no_shell_fails_the_job(place: Place) -> None:
    verdict = end_of(place.submit(SLEEPER, setup="if then"))
    assert verdict.state is JobState.FAILED
    assert verdict.exit_code != 0
    assert "syntax error" in verdict.text()


@pytest.mark.parametrize(
    "line", ['[ "$CLUSTERJOB_NODE_RANK" != 1 ]', '[ "$CLUSTERJOB_NODE_RANK" != 1 ] || exit 1']
)
def test_a_setup_line_that_fails_on_one_node_fails_all(place: Place, line: str) -> None:
    record = place.submit(SLEEPER, setup=line, join_timeout="60")
    verdict = end_of(record, PROMPT)
    assert (verdict.state, verdict.exit_code) == (JobState.FAILED, 1)
    assert verdict.failure is not None
    assert (verdict.failure.node_rank, verdict.failure.host) == (1, HOST)
    assert "setup line failed" in verdict.reason
    nothing_left(PROMPT)


@pytest.mark.parametrize("nodes", [1, 2])
def test_an_interpreter_that_is_not_there_fails_the_job(place: Place, nodes: int) -> None:
    record = place.submit(
        SLEEPER, nodes=nodes, python="/nonexistent/py thon", setup="true"
    )  # setup lines might bring it
    verdict = end_of(record, PROMPT)
    assert (verdict.state, verdict.exit_code) == (JobState.FAILED, 127)
    assert verdict.reason.startswith("node 0 (host ")
    assert "there is no interpreter /nonexistent/py thon" in verdict.reason


def test_an_interpreter_may_be_named_relative_to_the_working_directory(place: Place) -> None:
    assert end_of(place.submit("", python="./python")).state is JobState.SUCCEEDED


def test_a_working_directory_that_went_away_fails_the_job(place: Place) -> None:
    workdir = place.path("wörk 'dir'\n2")
    workdir.mkdir()
    (workdir / "script.py").touch()
    plan = place.plan(Program("script", "script.py"), workdir=str(workdir))
    shutil.rmtree(workdir)
    verdict = end_of(jobs.submit(plan, "local", detach=True), PROMPT)
    assert (verdict.state, verdict.exit_code) == (JobState.FAILED, 1)
    assert f"the working directory {sanitize(str(workdir))} cannot be entered" in verdict.text()


def test_a_script_that_went_away_fails_the_job(place: Place) -> None:
    place.script("")
    plan = place.plan(Program("script", "script.py"))
    place.path("script.py").unlink()
    verdict = end_of(jobs.submit(plan, "local", detach=True), PROMPT)
    assert verdict.state is JobState.FAILED
    assert "script.py" in verdict.text()


def test_agents_that_cannot_be_started_leave_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.script("")
    plan = place.plan(Program("script", "script.py"))
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SubmitError, match="an agent cannot be started"):
        jobs.submit(plan, "local", detach=True)
    assert not plan.job_dir.exists()
    assert Records().all() == []


def test_an_agent_that_cannot_be_started_takes_the_others_with_it(place: Place) -> None:
    place.script(SLEEPER)
    plan = place.plan(Program("script", "script.py"))
    plan = replace(
        plan, commands=(plan.commands[0], PlannedCommand(("/nonexistent/bash",), node_rank=1))
    )
    with pytest.raises(SubmitError, match="No such file"):
        jobs.submit(plan, "local", detach=True)
    assert own_marked() == []
    assert not plan.job_dir.exists()
    with pytest.raises(JobNotFound):
        Records().find(plan.job_id)


# -- GPUs -----------------------------------------------------------------------------------------------------------------


def test_too_few_gpus_make_a_rehearsal_on_the_cpu(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    place.script(
        "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']), os.environ['WORLD_SIZE'])"
    )
    plan = place.plan(Program("script", "script.py"), gpus_per_node="2")
    assert len(plan.notes) == 1
    assert "0 of the 4 GPUs" in plan.notes[0]
    assert "CPU" in plan.notes[0]
    record = jobs.submit(plan, "local", detach=True)
    assert end_of(record).state is JobState.SUCCEEDED
    for rank in range(4):
        assert (
            record.job_dir / "logs" / f"node{rank // 2}" / f"rank{rank}.out"
        ).read_text() == "'' 4\n"


def test_required_gpus_that_are_not_there_are_an_error(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    place.script("")
    with pytest.raises(SpecError, match="0 of the 4 GPUs") as caught:
        place.plan(Program("script", "script.py"), gpus_per_node="2", require_gpus=True)
    assert "--require-gpus" in caught.value.hint


def test_an_option_that_this_backend_does_not_know_is_an_error(place: Place) -> None:
    place.script("")
    with pytest.raises(SpecError, match="partition"):
        place.plan(Program("script", "script.py"), set=["partition=gpu"])


def test_a_job_directory_that_pythonpath_cannot_carry_is_an_error(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTERJOB_HOME", str(place.path("a:b")))
    place.script("")
    with pytest.raises(SpecError, match="colon"):
        place.plan(Program("script", "script.py"))


# -- a failure anywhere ---------------------------------------------------------------------------------------------------

ENDS = {
    "raise": ("raise ValueError('boom')", 1, None),
    "exit": ("sys.exit(3)", 3, None),
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL"),
    "segv": ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "SIGSEGV"),
}


@pytest.mark.parametrize("guilty", [1, 2])
@pytest.mark.parametrize("end", ENDS)
def test_a_worker_that_dies_ends_both_nodes(place: Place, end: str, guilty: int) -> None:
    statement, code, signal_name = ENDS[end]
    record = place.submit(
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
    place.wait_for("moment")
    died = float(place.path("moment").read_text())
    nothing_left(PROMPT)
    took = time.monotonic() - died
    verdict = end_of(record, PROMPT)
    print(f"{end} of rank {guilty}: nothing was left of two nodes {took:.2f} s after it")
    assert took < PROMPT
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


def test_real_process_groups_on_two_nodes(place: Place) -> None:
    """The script is plain torch; its store, devices and ranks come from the variables alone."""
    record = place.submit(
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
    verdict = end_of(record)
    assert verdict.state is JobState.SUCCEEDED, verdict.text()
    for rank in range(4):
        assert (
            record.job_dir / "logs" / f"node{rank // 2}" / f"rank{rank}.out"
        ).read_text() == f"{rank} 4 [10.0, 10.0, 10.0]\n"


def test_the_root_cause_among_effects_in_a_real_process_group(place: Place) -> None:
    record = place.submit(
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
    verdict = end_of(record)
    nothing_left(PROMPT)
    print(
        f"nothing was left {time.monotonic() - float(place.path('moment').read_text()):.2f} s after the exception"
    )
    assert (verdict.state, verdict.exit_code) == (JobState.FAILED, 1)
    assert verdict.failure is not None
    assert verdict.failure.rank == 3
    assert "ValueError: the root cause" in verdict.reason


def test_workers_are_started_again_as_often_as_allowed(place: Place) -> None:
    record = place.submit(
        """
        import os, sys
        print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"])
        sys.exit(9 if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0)
        """,
        max_restarts="2",
    )
    verdict = end_of(record)
    assert (verdict.state, verdict.exit_code, verdict.restarts) == (JobState.SUCCEEDED, 0, 1)
    assert jobs.status(Records().find(record.job_id)).restarts == 1
    lines: list[Any] = []
    jobs.follow(
        record, lambda batches: lines.extend(chain.from_iterable(batches)), progress=lambda _: None
    )
    assert [line.text for line in lines if line.rank == 1] == ["attempt 0 2", "attempt 1 2"]


def test_a_failure_beyond_the_allowed_restarts_is_the_verdict(place: Place) -> None:
    verdict = end_of(place.submit("raise SystemExit(6)", max_restarts="1"))
    assert (verdict.state, verdict.exit_code, verdict.restarts) == (JobState.FAILED, 6, 1)
    assert "after 1 restart" in verdict.text()


def test_the_time_limit_ends_a_job(place: Place) -> None:
    record = place.submit(SLEEPER, time="1s", grace="0.5")
    verdict = end_of(record)
    assert (verdict.state, verdict.exit_code) == (JobState.FAILED, 124)
    assert "time limit of 1 s" in verdict.reason
    nothing_left(PROMPT)


# -- processes that are killed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["agent 0", "agent 1", "starter 0", "starter 1", "worker 0", "worker 1", "all agents"]
)
def test_nothing_survives_the_kill_of_any_process(place: Place, kind: str) -> None:
    record = place.submit(SLEEPER + "\n", nproc_per_node="2")
    place.wait_for(*(f"up{rank}" for rank in range(4)))
    agents = agents_of(record)
    starters = [child for agent in agents for child in children(agent)]
    assert len(starters) == 2
    workers = [children(starter) for starter in starters]
    assert [len(group) for group in workers] == [2, 2]
    what, _, node = kind.partition(" ")
    node_rank = int(node) if node.isdigit() else 0
    targets = {
        "agent": [agents[node_rank]],
        "starter": [starters[node_rank]],
        "worker": [workers[node_rank][0]],
        "all": agents,
    }[what]
    kill_one_by_one(targets)
    took = nothing_left(LOST)
    verdict = end_of(record, PROMPT)
    print(
        f"kill -9 of {kind}: nothing was left {took:.2f} s after it; {verdict.text().splitlines()[0]}"
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
def test_nothing_survives_the_kill_of_a_node_that_is_still_being_set_up(
    place: Place, node_rank: int
) -> None:
    """Its shell is killed and its setup command is not; the other node's agent waits no longer than
    it may.
    """
    line = f'[ "$CLUSTERJOB_NODE_RANK" != {node_rank} ] || {{ touch in; sleep 1000; }}'
    record = place.submit(SLEEPER, setup=line, join_timeout="2")
    place.wait_for("in")
    kill_one_by_one([agents_of(record)[node_rank]])
    print(f"nothing was left after {nothing_left(LOST):.2f} s, with a join timeout of 2 s")
    verdict = end_of(record, PROMPT)
    assert verdict.state in (JobState.FAILED, JobState.LOST)
    assert verdict.exit_code != 0


def test_nothing_survives_the_kill_of_an_agent_whose_workers_are_stubborn(place: Place) -> None:
    """They ignore SIGTERM and have children in sessions of their own, which ignore it too."""
    record = place.submit(
        """
        import os, pathlib, signal, subprocess, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        pathlib.Path(f"up{os.environ['RANK']}").touch()
        time.sleep(1000)
        """
    )
    place.wait_for("up0", "up1")
    kill_one_by_one([agents_of(record)[0]])
    print(f"nothing was left after {nothing_left(LOST):.2f} s")
    assert end_of(record).state in (JobState.FAILED, JobState.LOST)


# -- cancelling ------------------------------------------------------------------------------------------------------------


def test_a_running_job_is_cancelled_once(place: Place) -> None:
    record = place.submit(SLEEPER)
    place.wait_for("up0", "up1")
    begin = time.monotonic()
    assert [was_running for _, was_running in jobs.cancel([record])] == [True]
    nothing_left(PROMPT)
    print(f"cancel took {time.monotonic() - begin:.2f} s")
    status = jobs.status(record)
    assert status.state is JobState.CANCELLED
    assert status.verdict is not None
    assert (status.verdict.exit_code, status.verdict.failure) == (143, None)
    assert [was_running for _, was_running in jobs.cancel([record])] == [False]
    assert jobs.status(Records().find(record.job_id)).state is JobState.CANCELLED


def test_workers_have_the_grace_to_save_their_work(place: Place) -> None:
    record = place.submit(
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
    place.wait_for("up0", "up1")
    jobs.cancel([record])
    assert place.path("saved0").exists()
    assert place.path("saved1").exists()
    assert jobs.status(record).state is JobState.CANCELLED


def test_a_worker_that_ignores_the_wish_is_killed_after_the_grace(place: Place) -> None:
    record = place.submit(
        """
        import os, pathlib, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path(f"up{os.environ['RANK']}").touch()
        time.sleep(1000)
        """,
        grace="0.5",
    )
    place.wait_for("up0", "up1")
    begin = time.monotonic()
    jobs.cancel([record])
    took = time.monotonic() - begin + nothing_left(PROMPT)
    print(f"workers that ignore SIGTERM were gone {took:.2f} s after cancel, with a grace of 0.5 s")
    assert 0.4 < took < PROMPT
    assert jobs.status(record).state is JobState.CANCELLED


def test_a_job_can_be_cancelled_at_every_moment_of_its_start(place: Place) -> None:
    """From the shell's first line to the running worker: each pause ends somewhere else on that
    way.
    """
    states = {}
    for milliseconds in (0, 5, 15, 30, 60, 100, 150, 250, 400):
        record = place.submit(SLEEPER)
        time.sleep(milliseconds / 1000)
        jobs.cancel([record])
        status = jobs.status(record)
        states[milliseconds] = (
            str(status.state),
            status.verdict.exit_code if status.verdict else None,
        )
        nothing_left(PROMPT)
    assert states == dict.fromkeys(states, ("CANCELLED", 143))


def test_a_job_is_cancelled_during_a_long_setup_line(place: Place) -> None:
    record = place.submit(SLEEPER, setup='touch "in$CLUSTERJOB_NODE_RANK"; sleep 1000')
    place.wait_for("in0", "in1")
    assert jobs.status(record).state is JobState.PENDING
    begin = time.monotonic()
    assert [was_running for _, was_running in jobs.cancel([record])] == [True]
    nothing_left(PROMPT)
    print(f"cancel during setup took {time.monotonic() - begin:.2f} s")
    status = jobs.status(record)
    assert status.state is JobState.CANCELLED, status
    assert status.verdict is not None
    assert status.verdict.exit_code == 143


def test_a_setup_line_that_ignores_the_wish_to_end_is_killed_with_all_its_children(
    place: Place,
) -> None:
    record = place.submit(
        SLEEPER, setup='trap "" TERM; touch "in$CLUSTERJOB_NODE_RANK"; sleep 1000', grace="0.3"
    )
    place.wait_for("in0", "in1")
    jobs.cancel([record])
    nothing_left(PROMPT)
    assert jobs.status(record).state is JobState.CANCELLED


def test_a_job_that_has_ended_is_not_cancelled(place: Place) -> None:
    record = place.submit("")
    end_of(record)
    assert [was_running for _, was_running in jobs.cancel([record])] == [False]
    assert jobs.status(record).state is JobState.SUCCEEDED


# -- directories and records that tell of another world --------------------------------------------------------------------


def test_a_directory_deleted_under_a_running_job(place: Place) -> None:
    record = place.submit(SLEEPER)
    place.wait_for("up0", "up1")
    shutil.rmtree(
        record.job_dir.rename(place.path("deleted"))
    )  # at once: what writes into it would make it again
    assert jobs.status(record).state in (JobState.RUNNING, JobState.UNKNOWN), (
        "it was started: it cannot be pending"
    )
    assert [was_running for _, was_running in jobs.cancel([record])] == [True]
    nothing_left(PROMPT)
    status = jobs.status(record)
    assert status.state in (JobState.CANCELLED, JobState.LOST)
    assert status.verdict is not None
    assert status.verdict.exit_code != 0


def test_verdict_of_a_job_whose_directory_was_deleted_is_kept_on_this_machine(place: Place) -> None:
    record = place.submit(
        """
        import os, pathlib, time
        pathlib.Path(f"up{os.environ['RANK']}").touch()
        while not os.path.exists("leave"):
            time.sleep(0.01)
        """
    )
    place.wait_for("up0", "up1")
    shutil.rmtree(
        record.job_dir.rename(place.path("deleted"))
    )  # at once: what writes into it would make it again
    place.path("leave").touch()
    nothing_left(PROMPT)
    verdict = end_of(record)
    assert (verdict.state, verdict.exit_code) == (JobState.SUCCEEDED, 0)
    assert "its directory cannot be written: No such file or directory" in verdict.reason


def test_a_directory_deleted_after_the_end(place: Place) -> None:
    known, unasked = place.submit(""), place.submit("")
    assert end_of(known).state is JobState.SUCCEEDED
    wait_until((unasked.job_dir / "result.json").exists, PATIENCE)
    nothing_left(PROMPT)
    shutil.rmtree(known.job_dir)
    shutil.rmtree(unasked.job_dir)
    assert jobs.status(Records().find(known.job_id)).state is JobState.SUCCEEDED, (
        "its end was noted in the record"
    )
    assert jobs.status(Records().find(unasked.job_id)).state is JobState.LOST
    assert (
        jobs.follow(Records().find(known.job_id), lambda _: None, progress=lambda _: None).exit_code
        == 0
    )


def test_a_job_from_before_a_reboot_is_lost(place: Place) -> None:
    record = place.submit(SLEEPER)
    place.wait_for("up0", "up1")
    handle = record.handle
    assert handle is not None
    stale = replace(
        record,
        handle=replace(
            handle, data={**handle.data, "boot_id": "00000000-0000-0000-0000-000000000000"}
        ),
    )
    agents = agents_of(record)
    assert jobs.status(stale).state is JobState.LOST
    assert [was_running for _, was_running in jobs.cancel([stale])] == [False]
    assert all(alive(agent) for agent in agents), (
        "whoever has these pids on this boot is someone else"
    )
    jobs.cancel([record])


@pytest.mark.parametrize("ticks", ["another process's", "none"])
def test_a_pid_that_another_process_has_now_is_not_taken_for_the_agent(
    place: Place, ticks: str
) -> None:
    record = place.submit("")
    assert end_of(record).state is JobState.SUCCEEDED
    bystander = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        own = processes.start_ticks(bystander.pid)
        assert own is not None
        assert record.handle is not None
        agents = [
            {"node_rank": 0, "pid": bystander.pid, "ticks": own - 1 if ticks != "none" else 0}
        ]
        wait_until(
            lambda: not any(alive(agent) for agent in agents_of(record)), PATIENCE
        )  # one that finds no result writes it
        (record.job_dir / "result.json").unlink()
        stale = replace(
            record,
            end=None,
            handle=replace(record.handle, data={**record.handle.data, "agents": agents}),
        )
        assert jobs.status(stale).state is JobState.LOST
        jobs.cancel([stale])
        assert bystander.poll() is None
        assert alive(bystander.pid)
    finally:
        bystander.kill()
        bystander.wait()


def test_a_job_of_another_host_is_neither_judged_nor_said_to_be_cancelled(
    place: Place, tmp_path: Path
) -> None:
    """The record may lie in a home directory that several hosts share."""
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
    status = jobs.status(record)
    assert (status.state, status.verdict) == (JobState.UNKNOWN, None)
    assert "elsewhere" in status.reason
    stopped = []
    with contextlib.suppress(ClusterJobError):  # to refuse is an answer too
        stopped = [was_running for _, was_running in jobs.cancel([record])]
    assert not any(stopped), "nobody has stopped it"


class LookedAtWhileItSubmits(LocalBackend):
    """The backend itself; in the middle of a submission, another terminal does something."""

    def __init__(self, look: Callable[[], object]) -> None:
        super().__init__()
        self.look = look
        self.seen: Any = None

    def submit(self, plan: Plan) -> Handle:
        handle = super().submit(plan)
        self.seen = self.look()
        return handle


def test_a_job_that_is_being_submitted_is_not_taken_for_dead(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record is on disk before its handle is."""
    listing = [sys.executable, "-m", "clusterjob", "list", "--json"]
    backend = LookedAtWhileItSubmits(
        lambda: subprocess.run(listing, capture_output=True, timeout=PATIENCE, check=True).stdout
    )
    monkeypatch.setitem(jobs._loaded, "local", backend)
    record = place.submit(SLEEPER)
    place.wait_for("up0", "up1")
    jobs.cancel([record])
    assert [job["state"] for job in json.loads(backend.seen)["jobs"]] == ["PENDING"]


def test_whoever_read_a_record_before_its_handle_was_there_does_not_overwrite_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LookedAtWhileItSubmits(lambda: Records().all())
    monkeypatch.setitem(jobs._loaded, "local", backend)
    record = place.submit(SLEEPER)
    place.wait_for("up0", "up1")
    jobs.statuses(backend.seen)  # the other terminal judges what it has read a moment ago
    again = Records().find(record.job_id)
    jobs.cancel([record])
    assert again.handle == record.handle, (
        "without it the job can no longer be asked after or cancelled"
    )
    assert again.end is None


def test_signals_to_the_submitting_terminal_do_not_reach_a_job(place: Place) -> None:
    record = place.submit(SLEEPER)
    place.wait_for("up0", "up1")
    own_group = os.getpgrp()
    assert all(os.getpgid(pid) != own_group for pid in own_marked())
    jobs.cancel([record])
    assert jobs.status(record).reason == "cancelled"
