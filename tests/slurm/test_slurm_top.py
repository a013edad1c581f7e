"""`top` for a job under a real Slurm."""

from __future__ import annotations

import re
import sys

import pytest
from procs import TEST_TIMEOUT, wait_until
from screens import Screen, require_tmux
from slurm_user import User
from stacked import WAITING

pytestmark = pytest.mark.slurm

OPTIONS = ("--nodes", "2", "--nproc-per-node", "2")


def test_top_of_job_under_slurm(user: User) -> None:
    require_tmux()
    job_id = user.submit(WAITING, *OPTIONS)
    user.wait_for("up0", "up1", "up2", "up3")
    top = f"{sys.executable} -m clusterjob top {job_id}"
    with Screen(top, columns=80, rows=24, directory=user.directory) as screen:
        screen.wait_for_all(job_id, "RUNNING", "4 ranks", " n1 ", " n2 ")
        memory = r"\n.? +3 +1 .* \d+(\.\d)?[MG] "  # the first metrics of rank 3 on node 1
        wait_until(lambda: re.search(memory, screen.text), TEST_TIMEOUT, "metrics of rank 3")
        screen.press("t")
        screen.wait_for_all(f"stacks of {job_id}", "rank 3 is in decode")
        screen.press("q")
        screen.wait_without("stacks of")
        screen.press("c")
        screen.wait_for_all("Cancel")
        screen.press("y")
        screen.wait_for_all("CANCELLED")
        screen.press("q")
        screen.wait_for_all("exit code 0")
        screen.assert_clean()
