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


def test_memory_grows_until_job_fits(user: User) -> None:
    memory = ["100", "150", "225"]
    retry = "oom_host:2:mem*1.5"
    job = user.submit(NEEDS_225_MB, "--nodes", "2", "--mem", "100M", "--retry", retry)
    user("wait", job, timeout=TEST_TIMEOUT)
    output = [line for line in user.output(job).splitlines() if "memory" in line]
    assert [
        line.partition("memory ")[2] for line in output[:: len(output) // len(memory)]
    ] == memory
    shown = user.job(job)
    kinds = [(each["attempt"], each["kind"]) for each in shown["attempts"]]
    assert kinds == [(0, "oom_host"), (1, "oom_host"), (2, "")]
    assert shown["state"] == "SUCCEEDED"
