"""A worker that writes anything where it can: tables, pipes, files, its own environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from launching import executable, new_folder
from procs import TEST_TIMEOUT, MakeJob

from clusterjob.node.stacks import collect, grouping
from clusterjob.node.stacks.grouping import Frame, RankStack, ThreadStack
from clusterjob.node.stacks.progress import Progress
from clusterjob.node.workers import forkserver_messages, torch_patches

FALSE_WORKERS = {
    "node_rank": 0, "attempt": 9, "world_size": 1, "environ": {},
    "workers": [{"rank": 0, "pid": 2**40, "variables": {}}],
}  # fmt: skip


@pytest.mark.parametrize(
    "table",
    [
        pytest.param('{"node_rank": 0, "attempt": 9}', id="incomplete", marks=pytest.mark.slow),
        pytest.param("[" * 100_000, id="nested", marks=pytest.mark.slow),
        pytest.param(json.dumps(FALSE_WORKERS), id="other processes"),
    ],
)
def test_false_table_of_worker_hides_no_hang(make_job: MakeJob, table: str) -> None:
    """A worker offers a table such as the forkserver's, which names the workers of the node."""
    job = make_job()
    job.path("table").write_text(table)
    script = job.script("""
        import os, pathlib, time
        file = os.memfd_create("clusterjob-workers")
        os.write(file, pathlib.Path("table").read_bytes())
        time.sleep(1000)
    """)
    job.run("--start", "exec", "--hang-timeout", "3s", script, code=1)
    assert job.result["failure"]["kind"] == "hang"
    assert job.result["evidence_ranks"] == 1


def test_endless_line_of_worker_fills_no_memory_and_hides_no_report() -> None:
    reports, write_end = os.pipe2(os.O_NONBLOCK)
    os.set_blocking(write_end, True)  # by any process that has the pipe

    def write() -> None:
        for _ in range(256):
            os.write(write_end, b"x" * (1 << 16))
        os.write(write_end, b'\n{"type": "WorkerAlive", "local_rank": 3, "step": 7}\n')

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    found = []
    while not found:
        found = list(forkserver_messages.read_reports(reports))
    writer.join()
    for descriptor in (reports, write_end):
        os.close(descriptor)
    assert found == [forkserver_messages.WorkerAlive(3, 7)]


def test_failure_that_is_too_long_for_one_write_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    reports, write_end = os.pipe2(os.O_NONBLOCK)
    monkeypatch.setenv("CLUSTERJOB_REPORT_FD", f"{write_end}:3:{os.getpid()}")
    monkeypatch.setenv("LOCAL_RANK", "0")  # a program may change it
    torch_patches.fail("x" * 9000, 1, "code", where="y" * 9000)
    [failing] = forkserver_messages.read_reports(reports)
    assert (failing.local_rank, failing.exit_code, failing.kind) == (3, 1, "code")
    assert (failing.message, failing.where) == ("x" * 900, "y" * 300)
    for descriptor in (reports, write_end):
        os.close(descriptor)


def test_pipe_in_place_of_stacks_file_does_not_block(tmp_path: Path) -> None:
    directory = new_folder(tmp_path / "logs" / "node0")
    os.mkfifo(directory / "stacks.json")

    def write() -> None:
        grouping.write_evidence(directory / "stacks.txt", "j-1", [], why="hang")

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(TEST_TIMEOUT / 4)
    if writer.is_alive():  # let it end
        os.close(os.open(directory / "stacks.json", os.O_RDONLY | os.O_NONBLOCK))
    writer.join()
    assert json.loads((directory / "stacks.json").read_text())["why"] == "hang"


def test_threads_with_ever_new_names_do_not_fill_the_memory() -> None:
    """A program may start new threads for each step, and be silent for days."""
    progress = Progress()
    frames = (Frame("/w/a.py", 1, "step"),)
    for sample in range(300):
        names = ["MainThread", *(f"thread {sample}.{number}" for number in range(10))]
        threads = tuple(ThreadStack(name, frames) for name in names)
        stack = RankStack(0, 0, "h", os.getpid(), state="sleeps", answered=True, threads=threads)
        progress.sample(lambda found=stack: [found])
    assert len(progress._workers[os.getpid()].places) == 10


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_py_spy_of_worker_that_became_another_user_is_not_run(tmp_path: Path) -> None:
    """Such a worker may write another PATH into its environment."""
    program = executable(tmp_path / "py-spy", "#!/bin/sh\n")
    code = (
        "import os, time, sys\n"
        "if sys.argv[1] == 'nobody':\n    os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "print(flush=True); time.sleep(1000)"
    )
    for user, path in (("root", str(program)), ("nobody", None)):
        with subprocess.Popen(
            [sys.executable, "-S", "-c", code, user],
            env={"PATH": str(tmp_path)},
            stdout=subprocess.PIPE,
        ) as worker:
            worker.stdout.readline()
            try:
                found = collect.py_spy_path(worker.pid)
            finally:
                worker.kill()
        assert found == path or (path is None and found != str(program))
