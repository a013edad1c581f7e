"""A job that runs out of host memory is queued again with more memory under a real Slurm."""

from __future__ import annotations

import pytest
from slurm_user import User

pytestmark = pytest.mark.slow

TEST_TIMEOUT = 240.0  # seconds; two requeues need 30
NEEDS_225_MB = """
    import os
    print("memory", os.environ["SLURM_MEM_PER_NODE"], flush=True)
    if int(os.environ["SLURM_MEM_PER_NODE"]) < 225:
        raise MemoryError
"""


@pytest.mark.parametrize(("times", "memory"), [(2, ["100", "150", "225"]), (1, ["100", "150"])])
def test_memory_grows_until_job_fits_or_restarts_are_used_up(
    user: User, times: int, memory: list[str]
) -> None:
    retry = f"oom_host:{times}:mem*1.5"
    job = user.submit(NEEDS_225_MB, "--nodes", "2", "--mem", "100M", "--retry", retry)
    user("wait", job, code=0 if times == 2 else 1, timeout=TEST_TIMEOUT)
    output = [line for line in user.output(job).splitlines() if "memory" in line]
    assert [
        line.partition("memory ")[2] for line in output[:: len(output) // len(memory)]
    ] == memory
    shown = user.job(job)
    kinds = [(each["attempt"], each["kind"]) for each in shown["attempts"]]
    expected = [(number, "oom_host") for number in range(len(memory))]
    if times == 2:
        expected[-1] = (2, "")
    assert kinds == expected
    assert shown["state"] == ("SUCCEEDED" if times == 2 else "FAILED")
