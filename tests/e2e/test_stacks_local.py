"""`clusterjob stacks` of jobs on this machine, for each way to start workers."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest
from inside_job import running, write_script
from procs import TEST_TIMEOUT, wait_until
from stacked import WAITING, check_stacks, stacks_json

TWO_NODES = ("--cluster", "local", "--nodes", "2", "--nproc-per-node", "2")
HOSTS = [socket.gethostname()] * 2


def test_stacks_of_forked_workers_and_of_a_stopped_one(tmp_path: Path, plain_python: str) -> None:
    program = (write_script(tmp_path, WAITING),)
    with running(tmp_path, *TWO_NODES, program=program) as job:
        check_stacks(job, 4, HOSTS)
        pid = stacks_json(job, "--rank", "1")["ranks"][0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            silent = stacks_json(job)["ranks"][1]
        finally:
            os.kill(pid, signal.SIGCONT)
        assert silent["state"].startswith("is stopped")
        # The request did not reach the stopped worker, and later ones do.
        assert stacks_json(job, "--rank", "1")["ranks"][0]["answered"]
        out, err = job.exec("--rank", "4", verb="stacks", code=2)
        assert (out, b"has no rank 4" in err) == (b"", True)
    out, err = job.exec(verb="stacks", code=255)
    assert (out, len(err.splitlines())) == (b"", 2)
    assert err.decode().startswith(f"clusterjob: error: job {job.id} has ended: CANCELLED")


@pytest.mark.parametrize(
    "program",
    [
        ("--start", "exec", "guest.py"),
        ("--", "bash", "run.sh"),
    ],
    ids=["exec", "below a shell"],
)
def test_stacks_of_workers_that_are_not_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CLUSTERJOB_PYTHON", sys.executable)
    write_script(tmp_path, WAITING)
    (tmp_path / "run.sh").write_text(f"{sys.executable} guest.py; true\n")
    with running(tmp_path, *TWO_NODES, program=program) as job:
        assert check_stacks(job, 4, HOSTS) > 0


@pytest.mark.slow
def test_collective_that_one_rank_does_not_join_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTERJOB_PYTHON", sys.executable)
    text = """
        import os, pathlib, time, torch
        import torch.distributed as dist
        from clusterjob import bootstrap

        def decode():
            time.sleep(1000)

        with bootstrap.init() as ctx:
            pathlib.Path(f"up{ctx.rank}").touch()
            decode() if ctx.rank == 1 else dist.all_reduce(torch.ones(1))
    """
    program = (write_script(tmp_path, text),)
    with running(tmp_path, *TWO_NODES, program=program) as job:
        head = re.compile(
            rb"ranks 0, 2-3 wait in all_reduce .*; rank 1 is in decode \(guest\.py:7\)"
        )
        wait_until(lambda: head.match(job.exec(verb="stacks")[0]) is not None, TEST_TIMEOUT)
