"""The output of workers: kept when files are reopened or the forkserver is killed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from pathlib import Path

import pytest
from procs import TEST_TIMEOUT, Job, MakeJob, wait_until

from clusterjob.node.workers import output_drain

# The forkserver's other child writes the output into the files.
DRAIN = """
import os, signal, sys
def drain():
    parent = os.getppid()
    with open(f"/proc/{parent}/task/{parent}/children") as stream:
        return next(int(pid) for pid in stream.read().split() if int(pid) != os.getpid())
"""


def run(job: Job, text: str, *options: str) -> int:
    """Run a script on one node; return the agent's exit code."""
    script = job.script(text)
    return job.start(0, "--no-echo", *options, script).wait(TEST_TIMEOUT)


def test_output_is_kept_when_a_program_opens_the_stream_for_writing(make_job: MakeJob) -> None:
    job = make_job()
    text = """
import os, sys
print("out 1", flush=True), print("err 1", file=sys.stderr)
os.system("echo err 2 > /dev/stderr; echo out 2 > /dev/stdout")
with open("/dev/stdout", "w") as stream: stream.write("out 3\\n")
print("out 4"), print("err 3", file=sys.stderr)
"""
    assert run(job, text) == 0
    assert job.log(0, "rank0.out") == "out 1\nout 2\nout 3\nout 4\n"
    assert job.log(0, "rank0.err") == "err 1\nerr 2\nerr 3\n"


def test_workers_end_with_the_process_that_writes_their_output(make_job: MakeJob) -> None:
    text = DRAIN + "import time; os.kill(drain(), signal.SIGKILL), time.sleep(1000)"
    job = make_job(1)
    assert run(job, text) == 1
    assert job.result["failure"]["kind"] == "process_lost"
    assert "the forkserver was lost" in job.result["reason"]


def test_flush_empties_a_pipe_that_is_larger_than_usual(tmp_path: Path) -> None:
    pid, control = output_drain.start()
    os.kill(pid, signal.SIGSTOP)
    stream = output_drain.open_stream(control, tmp_path / "out")
    # As a program may do.
    fcntl.fcntl(stream, fcntl.F_SETPIPE_SZ, 1 << 20)
    assert stream.write(b"x" * (1 << 20)) == 1 << 20
    os.kill(pid, signal.SIGCONT)
    output_drain.flush(control)
    size = (tmp_path / "out").stat().st_size
    stream.close()
    control.close()
    os.waitpid(pid, 0)
    assert size == 1 << 20


def test_last_output_is_kept_when_the_forkserver_is_killed(make_job: MakeJob) -> None:
    job = make_job()
    text = DRAIN + "os.write(1, b'x' * 250_000), os.kill(os.getppid(), signal.SIGKILL)"
    assert run(job, text) == 1
    assert job.log(0, "rank0.out") == "x" * 250_000


def test_traceback_in_delayed_output_is_the_message_of_the_failure(make_job: MakeJob) -> None:
    """The worker reports sys.exit(1) while its stderr is still in the pipe."""
    text = """
import atexit, time, traceback
os.kill(drain(), signal.SIGSTOP)
atexit.register(lambda: (time.sleep(0.3), os.kill(drain(), signal.SIGCONT)))
try:
    raise ValueError("boom")
except ValueError:
    traceback.print_exc()
    sys.exit(1)
"""
    job = make_job(1)
    assert run(job, DRAIN + text) == 1
    failure = json.loads((job.dir / "result.json").read_text())["failure"]
    assert failure["message"] == "ValueError: boom (sys.exit(1))"


def test_worker_waits_while_its_output_cannot_be_written(make_job: MakeJob) -> None:
    text = """
os.kill(drain(), signal.SIGSTOP)
with open("drain", "w") as stream: stream.write(f"{drain()} {os.getpid()}")
for _ in range(30):
    os.write(1, b"x" * 100_000)
"""
    job = make_job()
    agent = job.start(0, "--no-echo", job.script(DRAIN + text), until=("drain",))
    drain, worker = map(int, job.path("drain").read_text().split())

    def waits() -> bool:
        with open(f"/proc/{worker}/wchan") as stream:
            return "pipe" in stream.read()

    wait_until(waits, TEST_TIMEOUT)
    os.kill(drain, signal.SIGCONT)
    assert agent.wait(TEST_TIMEOUT) == 0
    assert job.log(0, "rank0.out") == "x" * 3_000_000


def test_output_of_child_that_outlives_its_worker_is_in_the_log(make_job: MakeJob) -> None:
    text = """
import os, time
parent = os.getpid()
if os.environ["RANK"] == "1":
    if os.fork() == 0:
        while os.getppid() == parent:
            time.sleep(0.01)
        print("child")
        open("written", "w").close()
        os._exit(0)
else:
    while not os.path.exists("written"):
        time.sleep(0.01)
"""
    job = make_job()
    assert run(job, text, "--nproc-per-node", "2") == 0
    assert job.log(0, "rank1.out") == "child\n"


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_lines_of_both_streams_are_shown_in_order(make_job: MakeJob, start: str) -> None:
    job = make_job()
    text = """
import sys, time
for number in range(3):
    print("out", number)
    time.sleep(0.3)
    print("err", number, file=sys.stderr)
    time.sleep(0.3)
"""
    with open(job.path("shown"), "w") as shown:
        agent = job.start(
            0, "--start", start, job.script(text), stdout=shown.fileno(), stderr=shown.fileno()
        )
        assert agent.wait(TEST_TIMEOUT) == 0
    lines = [
        line for line in job.path("shown").read_text().splitlines() if "clusterjob" not in line
    ]
    assert lines == [f"[0] {name} {number}" for number in range(3) for name in ("out", "err")]
