"""The failure in a verdict: last exception, last lines, and hint."""

from __future__ import annotations

import json

import pytest
from procs import WITH_TORCH, Job, MakeJob


def failure_of(job: Job) -> dict[str, str]:
    return json.loads((job.dir / "result.json").read_text())["failure"]


@pytest.mark.parametrize(("mode", "leaks"), [("fork", 0), ("exec", 0), ("fork", 43)])
def test_printed_traceback_before_exit_gives_exception_as_message(
    make_job: MakeJob, mode: str, leaks: int
) -> None:
    job = make_job(1)
    script = job.script(f"""
        import atexit, sys, traceback
        atexit.register(lambda: sys.stderr.write("nanobind: leaked instance\\n" * {leaks}))
        try:
            raise ValueError("boom")
        except ValueError:
            traceback.print_exc()
            print(
                "\\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.",
                file=sys.stderr,
            )
            sys.exit(1)
    """)
    job.run("--start", mode, script, code=1)
    exit_text = {"fork": "sys.exit(1)", "exec": "exited with code 1"}[mode]
    failure = failure_of(job)
    assert failure["message"] == f"ValueError: boom ({exit_text})"
    assert failure["kind"] == "code"
    if leaks:
        assert failure["last_lines"][-2:] == [
            "ValueError: boom", f"({leaks + 1} more lines followed)"
        ]  # fmt: skip


def test_c10d_warnings_are_removed_from_last_lines(make_job: MakeJob) -> None:
    job = make_job(1)
    warning = (
        "[rank0]:[W1122 05:56:21.930705543 TCPStore.cpp:106] [c10d]"
        " sendBytes failed on SocketImpl(fd=3): Broken pipe"
    )
    script = job.script(f"""
        import os, sys
        print("out of data", file=sys.stderr)
        print("\\n".join([{warning!r}] * 40), file=sys.stderr)
        os._exit(3)
    """)
    job.run("--start", "exec", script, code=3)
    assert failure_of(job)["last_lines"] == ["out of data"]
    assert not failure_of(job)["effect"]  # the text does not mention a lost peer


def test_nccl_without_gpu_gives_hint_to_use_gloo(make_job: MakeJob) -> None:
    job = make_job(1)
    script = job.script("""
        import torch.distributed as dist
        dist.init_process_group("nccl")
    """)
    job.run("--start", "fork", script, python=WITH_TORCH, env={"CUDA_VISIBLE_DEVICES": ""}, code=1)
    message = failure_of(job)["message"]
    assert "NCCL" in message
    assert message.endswith(
        '; this worker sees no GPU: use init_process_group("gloo"), or backend=None,'
        " which works with and without GPUs"
    )
