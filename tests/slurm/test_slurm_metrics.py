"""Metrics and efficiency of Slurm jobs, on a login node and from a laptop."""

from __future__ import annotations

import json

from login_user import Laptop
from procs import TEST_TIMEOUT, wait_until
from slurm_user import GUEST, User


def sampled_ranks(user: User | Laptop, job_id: str) -> list[set[int]]:
    try:
        text = user("metrics", job_id, "--json").stdout
    except AssertionError:  # there is no sample yet
        return []
    nodes = json.loads(text)["nodes"]
    return [{one["rank"] for one in node["samples"][-1]["workers"]} for node in nodes]


def test_metrics_and_efficiency_of_job_on_two_nodes(user: User) -> None:
    words = ("--nodes", "2", "--nproc-per-node", "2", "--mem", "900M")
    job_id = user.submit(GUEST, *words)
    wait_until(lambda: sampled_ranks(user, job_id) == [{0, 1}, {2, 3}], TEST_TIMEOUT)
    user.path("leave").touch()
    user("wait", job_id)
    used = user.job(job_id)["efficiency"]
    assert [node["node_rank"] for node in used["nodes"]] == [0, 1]
    assert used["wall_seconds"] > used["startup_seconds"] >= 0
    assert "efficiency: wall" in user("status", job_id).stdout
    assert "without an agent" in user_without_agent(user)


def user_without_agent(user: User) -> str:
    """Return the error of `metrics` for a job whose workers srun starts."""
    job_id = user.submit("pass", "--launcher", "srun")
    user("wait", job_id)
    return user("metrics", job_id, code=1).stderr


def test_efficiency_of_array_is_the_sum_of_its_elements(user: User) -> None:
    job_id = user.submit(
        "import time; time.sleep(9)", "--array", "0-1"
    )  # the first sample comes after 5 s
    user("wait", job_id)
    shown = user("status", job_id).stdout
    assert "efficiency of 2 jobs: wall " in shown
    assert "is an array: each element has its own metrics" in user("metrics", job_id, code=2).stderr
    assert "NODE" in user("metrics", f"{job_id}_1").stdout
    row = user("list", "--efficiency").stdout.splitlines()[1]
    assert row.split()[0] == job_id
    assert " MB" in row
