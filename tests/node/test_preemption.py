"""Warn jobs before their nodes are taken away, and check how they end.

Agents and workers are real processes; the signals are those that a scheduler sends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from launching import HOST, write_tree
from procs import (
    TEST_TIMEOUT,
    WITH_TORCH,
    Job,
    MakeJob,
    below,
    own_processes,
    wait_until,
)

from clusterjob.node.logs import ends
from clusterjob.node.workers.forkserver import WarningPipe

# Workers have at least half of it, 30 s; no test waits that long.
WARNING = ("--warning", "60")

# A context for workers that need no torch.
FAKE_CONTEXT = """
    import os, pathlib, signal, sys, time
    from types import SimpleNamespace
    from clusterjob.worker.context import Context
    local_rank = int(os.environ["LOCAL_RANK"])
    ctx = Context(source="test", local_rank=local_rank)
    ctx.device = SimpleNamespace(type="cpu")
    rank = os.environ["RANK"]
    def tell(name, text=""):
        pathlib.Path(f"{name}{rank}.new").write_text(text)
        os.rename(f"{name}{rank}.new", f"{name}{rank}")
"""
# Leaves as soon as it is warned, or ends by itself when the test lets it.
POLLS_WARNING = """
    from place import *
    ctx.preempted
    tell("up")
    while not ctx.preempted:
        if os.path.exists("go"):
            sys.exit(0)
        time.sleep(0.01)
    print("warned at attempt", ctx.attempt)
    tell("warned")
    ctx.requeue()
"""
USES_CALLBACKS = """
    import threading
    from place import *
    def first():
        assert threading.current_thread() is threading.main_thread()
        print("first")
    def second():
        print("second")
        ctx.requeue()
    ctx.on_preempt(first)
    ctx.on_preempt(second)
    tell("up")
    while True:  # a signal just before a sleep does not shorten it
        time.sleep(0.1)
"""
IGNORES_WARNING = """
    from place import *
    tell("up")
    time.sleep(1000)
"""


def write_scripts(job: Job, text: str) -> str:
    job.script(FAKE_CONTEXT, "place.py")
    return job.script(text)


def up(job: Job, ranks: int) -> None:
    job.wait_for(*(f"up{rank}" for rank in range(ranks)))


def signal_all(pids: list[int], number: int) -> None:
    """Signal processes; ignore those that have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def check_preempted(job: Job, why: str, how: str = "its workers left to be queued again") -> None:
    result = job.result
    assert (result["state"], result["exit_code"], result["failure"], result["consequences"]) == (
        "PREEMPTED",
        75,
        None,
        [],
    )
    assert result["reason"] == f"{why}: {how}"
    assert len(job.events("warned")) == 1
    assert job.events("warned")[0]["why"] == why
    assert not job.events("restart")
    assert not own_processes()


# -- delivery of the warning -----------------------------------------------------------------------


@pytest.mark.parametrize(("node", "mode"), [(0, "fork"), (1, "exec")])
def test_warning_to_any_node_reaches_every_worker(make_job: MakeJob, node: int, mode: str) -> None:
    job = make_job(2)
    job.start_all(
        *WARNING,
        "--start",
        mode,
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "3",
        write_scripts(job, POLLS_WARNING),
    )
    up(job, 4)
    for _ in range(3):
        job.agents[node].send_signal(signal.SIGUSR1)
    assert job.wait() == [75, 75]
    check_preempted(job, f"SIGUSR1 on {HOST}")
    for rank in range(4):
        assert job.log(rank // 2, f"rank{rank}.out") == "warned at attempt 0\n"
    assert [job.node_end(rank)["state"] for rank in (0, 1)] == ["PREEMPTED", "PREEMPTED"]
    assert f"warning: SIGUSR1 on {HOST}: the workers have 55 s to leave" in job.stderr(
        job.agents[0]
    )
    assert f"PREEMPTED: SIGUSR1 on {HOST}" in job.stderr(job.agents[1])


@pytest.mark.parametrize(("mode", "number"), [("fork", "SIGUSR1"), ("exec", "SIGUSR2")])
def test_every_end_after_warning_signal_is_preemption(
    make_job: MakeJob, mode: str, number: str
) -> None:
    """One worker handles the signal and fails; the signal itself ends the other one."""
    text = """
        import os, pathlib, signal, sys, time
        rank = os.environ["RANK"]
        number = getattr(signal, sys.argv[1])
        signal.signal(number, (lambda *_: sys.exit("saved")) if rank == "0" else signal.SIG_DFL)
        pathlib.Path(f"up{rank}").touch()
        time.sleep(1000)
        """
    job = make_job(2)
    job.start_all(*WARNING, "--start", mode, "--warn-signal", number, job.script(text), number)
    up(job, 2)
    job.agents[1].send_signal(signal.SIGUSR1)
    assert job.wait() == [75, 75]
    check_preempted(job, f"SIGUSR1 on {HOST}")
    assert "saved" in job.log(0, "rank0.err")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_preemptible_job_is_cancelled_at_once_without_warning(
    make_job: MakeJob, number: signal.Signals
) -> None:
    """The workers treat SIGTERM as a warning, but end at once because the job is cancelled."""
    job = make_job(2)
    job.start_all(*WARNING, "--grace", "45", write_scripts(job, USES_CALLBACKS))
    up(job, 2)
    if number == signal.SIGTERM:
        ends.cancel(job.dir)
    begin = time.monotonic()
    job.agents[1].send_signal(number)
    assert job.wait() == [143, 143]
    assert time.monotonic() - begin < 30
    assert job.result["state"] == "CANCELLED"
    assert not job.events("warned")
    assert job.log(0, "rank0.out") == ""


def test_warning_before_agents_listen_preempts_job(make_job: MakeJob) -> None:
    job = make_job(2)
    (job.dir / "ends").mkdir()
    ends.warning_file(job.dir, 0).touch()
    job.run(*WARNING, write_scripts(job, IGNORES_WARNING), code=75)
    check_preempted(
        job, f"a warning on {HOST}, while the job was starting", "before its workers had started"
    )
    assert not job.path("up0").exists()


@pytest.mark.parametrize("moment", [0.02, 0.1, 0.2])
def test_sigusr1_during_start_preempts_job(make_job: MakeJob, moment: float) -> None:
    """The signal comes after the fork of the forkserver.

    Before that fork, the script ignores SIGUSR1.
    """
    job = make_job()
    script = write_scripts(job, POLLS_WARNING)
    trapped = ["bash", "-c", "trap '' USR1; exec \"$@\"", "-", sys.executable, "-S"]
    agent = job.start(0, *WARNING, script, python=tuple(trapped))
    time.sleep(moment)
    wait_until(lambda: below(agent.pid) or agent.poll() is not None, TEST_TIMEOUT)
    signal_all([agent.pid, *below(agent.pid)], signal.SIGUSR1)
    assert job.wait() == [75]
    assert job.result["reason"].startswith(f"SIGUSR1 on {HOST}: ")


@pytest.mark.parametrize("mode", ["fork", "exec"])
def test_signal_to_all_processes_of_job_ends_none_of_them(make_job: MakeJob, mode: str) -> None:
    """Slurm signals all processes of a step; SIGTERM to an agent counts as a warning."""
    job = make_job(2)
    script = write_scripts(
        job,
        """
        from place import *
        ctx.preempted
        tell("up")
        while not ctx.preempted:
            time.sleep(0.01)
        time.sleep(0.5)
        print("saved")
        ctx.requeue()
    """,
    )
    job.start_all(*WARNING, "--start", mode, "--nproc-per-node", "2", script, python=WITH_TORCH)
    up(job, 4)
    signal_all(own_processes(), signal.SIGTERM)
    assert job.wait() == [75, 75]
    check_preempted(job, f"SIGTERM on {HOST}")
    assert [job.log(rank // 2, f"rank{rank}.out") for rank in range(4)] == ["saved\n"] * 4


# -- end of a warned job ---------------------------------------------------------------------------


def test_exception_in_callback_ends_script(make_job: MakeJob) -> None:
    job = make_job()
    script = write_scripts(
        job,
        """
        from place import *
        def save():
            raise OSError("no space left")
        ctx.on_preempt(save)
        ctx.on_preempt(lambda: tell("second"))
        tell("up")
        try:
            time.sleep(1000)
        finally:
            tell("finally")
    """,
    )
    job.start(0, *WARNING, script)
    up(job, 1)
    job.agents[0].send_signal(signal.SIGUSR1)
    assert job.wait() == [1]
    assert "OSError: no space left" in job.result["reason"]
    assert job.path("finally0").exists()
    assert not job.path("second0").exists()


def test_worker_sees_warning_again_after_restart(make_job: MakeJob) -> None:
    """After a failure with restarts left, the new workers see the warning from the start."""
    job = make_job()
    script = write_scripts(
        job,
        """
        from place import *
        tell("up")
        while not ctx.preempted:
            time.sleep(0.01)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("the first time")
        ctx.requeue()
    """,
    )
    job.start(0, *WARNING, "--max-restarts", "1", script)
    up(job, 1)
    job.agents[0].send_signal(signal.SIGUSR1)
    assert job.wait() == [75]
    assert (job.result["state"], job.result["restarts"]) == ("PREEMPTED", 1)


# -- the next attempt ------------------------------------------------------------------------------


def test_next_attempt_runs_in_same_job_directory(make_job: MakeJob) -> None:
    job = make_job(2)
    script = write_scripts(job, POLLS_WARNING)
    job.start_all(*WARNING, script)
    up(job, 2)
    job.agents[0].send_signal(signal.SIGUSR1)
    assert job.wait() == [75, 75]
    (job.dir / "ends" / "node1.refused").write_text("1\nold: an older start's refusal")
    for rank in (0, 1):
        job.path(f"up{rank}").unlink()

    for node_rank in (0, 1):
        job.start(node_rank, *WARNING, script, env={"CLUSTERJOB_ATTEMPT": "1"})
    wait_until(lambda: job.path("up0").exists() and job.path("up1").exists(), TEST_TIMEOUT)
    assert not (job.dir / "result.json").exists(), "the job runs: it has no result"
    job.agents[2].send_signal(signal.SIGUSR1)
    assert job.wait()[2:] == [75, 75]
    assert (job.result["state"], job.result["attempt"]) == ("PREEMPTED", 1)
    assert json.loads((job.dir / "ends" / "result.attempt0.json").read_text())["attempt"] == 0
    assert [job.node_end(node)["attempt"] for node in (0, 1)] == [1, 1]
    for rank in (0, 1):
        assert job.log(rank, f"rank{rank}.out") == "warned at attempt 0\n"
        assert job.log(rank, f"rank{rank}.attempt1.out") == "warned at attempt 1\n"
    assert "warned at attempt 0" not in job.stdout(job.agents[2])
    assert "warned at attempt 1" in job.stdout(job.agents[2])
    assert "attempt 1: the job was queued again" in job.stderr(job.agents[2])
    assert [event["attempt"] for event in job.events("started")] == [0, 1]


def test_failure_of_agent_of_old_attempt_does_not_replace_result(make_job: MakeJob) -> None:
    job = make_job()
    job.path("go").touch()
    script = write_scripts(job, POLLS_WARNING)
    job.start(0, script, env={"CLUSTERJOB_ATTEMPT": "2"})
    assert job.wait() == [0]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        # The port is in use, so this agent cannot become the coordinator.
        job.start(0, script, env={"CLUSTERJOB_ATTEMPT": "1", "CLUSTERJOB_MASTER_PORT": port})
        assert job.wait() == [0, 1]
    assert (job.result["state"], job.result["attempt"]) == ("SUCCEEDED", 2)
    assert job.node_end(0)["attempt"] == 2


# -- worker without an agent -----------------------------------------------------------------------


def run_alone(
    directory: Path, text: str, extra: dict[str, str], fd: int | None = None
) -> subprocess.Popen[str]:
    """Start a process with the variables of a worker, but without an agent."""
    write_tree(
        directory, **{"place.py": textwrap.dedent(FAKE_CONTEXT), "alone.py": textwrap.dedent(text)}
    )
    environ = os.environ | {"RANK": "0", "LOCAL_RANK": "0"} | extra
    return subprocess.Popen(
        [sys.executable, "-S", "alone.py"],
        cwd=directory,
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=() if fd is None else (fd,),
    )


def result_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=TEST_TIMEOUT)
    assert "Traceback" not in err, err
    return process.returncode, out


def test_worker_without_agent_reads_warning_file_of_its_attempt(tmp_path: Path) -> None:
    (tmp_path / "ends").mkdir()
    process = run_alone(
        tmp_path, USES_CALLBACKS, {"CLUSTERJOB_JOB_DIR": str(tmp_path), "CLUSTERJOB_ATTEMPT": "3"}
    )
    wait_until((tmp_path / "up0").exists, TEST_TIMEOUT)
    for attempt in (2, 3):
        ends.warning_file(tmp_path, attempt).touch()
    assert result_of(process) == (75, "first\nsecond\n")


SAVED = (75, "first\nsecond\n")


@pytest.mark.parametrize(
    ("number", "variable", "expected"),
    [
        (signal.SIGUSR1, "", SAVED),
        (signal.SIGTERM, "none", SAVED),
        *((signal.SIGTERM, pipe, (-signal.SIGTERM, "")) for pipe in ("", "0:1", "999999:1")),
    ],
)
def test_signal_warns_worker_without_agent_unless_its_warning_pipe_is_invalid(
    tmp_path: Path, number: int, variable: str, expected: tuple[int, str]
) -> None:
    process = run_alone(tmp_path, USES_CALLBACKS, {"CLUSTERJOB_WARNING_FD": variable})
    wait_until((tmp_path / "up0").exists, TEST_TIMEOUT)
    process.send_signal(number)
    assert result_of(process) == expected


def test_sigterm_ends_worker_of_cancelled_job(tmp_path: Path) -> None:
    process = run_alone(
        tmp_path,
        USES_CALLBACKS,
        {"CLUSTERJOB_WARNING_FD": "none", "CLUSTERJOB_JOB_DIR": str(tmp_path)},
    )
    wait_until((tmp_path / "up0").exists, TEST_TIMEOUT)
    ends.cancel(tmp_path)
    process.terminate()
    assert result_of(process) == (-signal.SIGTERM, "")


@pytest.fixture
def pipe():
    warning_pipe = WarningPipe()
    yield warning_pipe
    for descriptor in (warning_pipe.write_end, int(warning_pipe.name.partition(":")[0])):
        try:
            os.close(descriptor)
        except OSError:
            pass


def test_first_sigterm_warns_worker_and_second_ends_it(tmp_path: Path, pipe: WarningPipe) -> None:
    text = """
        from place import *
        ctx.on_preempt(lambda: tell("warned"))
        tell("up")
        while True:
            time.sleep(0.01)
    """
    process = run_alone(
        tmp_path, text, {"CLUSTERJOB_WARNING_FD": pipe.name}, int(pipe.name.partition(":")[0])
    )
    wait_until((tmp_path / "up0").exists, TEST_TIMEOUT)
    process.terminate()
    wait_until((tmp_path / "warned0").exists, TEST_TIMEOUT)
    assert process.poll() is None
    process.terminate()
    assert result_of(process)[0] == -signal.SIGTERM


def test_sigterm_ends_forked_child_of_worker(tmp_path: Path, pipe: WarningPipe) -> None:
    """multiprocessing and torch's DataLoader end their processes by SIGTERM, and wait."""
    text = """
        import multiprocessing
        from place import *
        asked = sys.argv[1:] == ["asked"]
        def sleep():
            ctx.preempted
            tell("child")
            time.sleep(1000)
        if os.environ["ASKED"] == "before":
            ctx.on_preempt(lambda: None)
        child = multiprocessing.get_context("fork").Process(target=sleep)
        child.start()
        while not os.path.exists("child0"):
            time.sleep(0.01)
        child.terminate()
        child.join(30)
        print(child.exitcode)
    """
    for asked in ("before", "after"):
        extra = {"CLUSTERJOB_WARNING_FD": pipe.name, "ASKED": asked}
        assert result_of(run_alone(tmp_path, text, extra, int(pipe.name.partition(":")[0]))) == (
            0,
            "-15\n",
        )
        (tmp_path / "child0").unlink()


def test_callback_added_after_warning_runs_at_once(tmp_path: Path, pipe: WarningPipe) -> None:
    text = """
        import threading
        from place import *
        def name():
            print(threading.current_thread().name, flush=True)
        ctx.preempted
        tell("up")
        while not ctx.preempted:
            time.sleep(0.01)
        ctx.on_preempt(name)
        begin = time.perf_counter()
        for _ in range(1000):
            ctx.preempted
        assert time.perf_counter() - begin < 1
    """
    process = run_alone(
        tmp_path, text, {"CLUSTERJOB_WARNING_FD": pipe.name}, int(pipe.name.partition(":")[0])
    )
    wait_until((tmp_path / "up0").exists, TEST_TIMEOUT)
    pipe.warn()
    assert result_of(process) == (0, "MainThread\n")


def test_process_outside_job_is_never_preempted(tmp_path: Path) -> None:
    text = """
        from place import *
        ctx.on_preempt(lambda: print("called"))
        print(ctx.preempted, ctx.attempt)
    """
    assert result_of(run_alone(tmp_path, text, {})) == (0, "False 0\n")
