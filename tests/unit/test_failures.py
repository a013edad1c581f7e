"""What a verdict says of a worker's end: its last exception, its own last lines, and a hint where
it needs one.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from procs import WITH_TORCH, Job

NewJob = Callable[..., Job]


def failure_of(job: Job) -> dict[str, str]:
    return json.loads((job.dir / "result.json").read_text())["failure"]


@pytest.mark.parametrize("mode", ["fork", "exec"])
def test_a_program_that_prints_its_traceback_and_exits_is_told_by_the_exception(
    new_job: NewJob, mode: str
) -> None:
    job = new_job(1)
    script = job.script("""
        import sys, traceback
        try:
            raise ValueError("boom")
        except ValueError:
            traceback.print_exc()
            print("\\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.", file=sys.stderr)
            sys.exit(1)
    """)
    job.start(0, "--start", mode, script)
    assert job.wait() == [1]
    how = {"fork": "sys.exit(1)", "exec": "exited with code 1"}[mode]
    assert failure_of(job)["message"] == f"ValueError: boom ({how})"


def test_warnings_of_c10d_are_not_among_the_last_lines(new_job: NewJob) -> None:
    job = new_job(1)
    warning = "[rank0]:[W1122 05:56:21.930705543 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=3): Broken pipe"
    script = job.script(f"""
        import os, sys
        print("out of patience", file=sys.stderr)
        print("\\n".join([{warning!r}] * 40), file=sys.stderr)
        os._exit(3)
    """)
    job.start(0, "--start", "exec", script)
    assert job.wait() == [3]
    assert failure_of(job)["last_lines"] == ["out of patience"]
    assert not failure_of(job)["effect"]  # it is no word of a lost peer


def test_nccl_in_a_rehearsal_without_gpus_is_told_what_suits_it(new_job: NewJob) -> None:
    job = new_job(1)
    script = job.script("""
        import torch.distributed as dist
        dist.init_process_group("nccl")
    """)
    job.start(0, "--start", "fork", script, python=WITH_TORCH, env={"CUDA_VISIBLE_DEVICES": ""})
    assert job.wait() == [1]
    message = failure_of(job)["message"]
    assert "NCCL" in message
    assert message.endswith(
        '; this worker sees no GPU: init_process_group("gloo") suits a rehearsal, and backend=None suits both'
    )
