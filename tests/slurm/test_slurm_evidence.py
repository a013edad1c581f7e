"""`cancel --stacks` and `--hang-timeout` under a real Slurm."""

from __future__ import annotations

import json

import pytest
from slurm_user import User

pytestmark = pytest.mark.slurm

WAITING = """
    import os, pathlib, threading
    pathlib.Path(f"up{os.environ['RANK']}").touch()
    def rest():
        threading.Event().wait()
    rest()
"""
OPTIONS = ("--nodes", "2", "--nproc-per-node", "2")


def test_stacks_are_saved_before_scancel(user: User) -> None:
    job_id = user.submit(WAITING, *OPTIONS)
    user.wait_for("up0", "up1", "up2", "up3")
    user("cancel", "--stacks", job_id)
    user.wait_for_state(job_id, "CANCELLED")
    data = json.loads((user.directory_of(job_id) / "logs/node0/stacks.json").read_text())
    assert [(each["rank"], each["node_rank"]) for each in data["ranks"]] == [
        (0, 0), (1, 0), (2, 1), (3, 1),
    ]  # fmt: skip
    assert all(each["answered"] for each in data["ranks"])
    assert "stacks of 4 ranks: logs/node0/stacks.txt" in user("status", job_id).stdout
