"""Slurm jobs with spare nodes, elastic jobs, and jobs that leave out nodes after a requeue."""

from __future__ import annotations

import pytest
from procs import below, environ, kill_all, wait_until
from slurm_user import User

from clusterjob.node.logs import ends

pytestmark = pytest.mark.slow

TEST_TIMEOUT = 60.0  # seconds; slurmctld needs up to 25 s to notice a lost node
# Creates the file up<RESTART>.<RANK>, prints its place, and ends when the file `leave` exists.
GUEST = """
    import os, pathlib, time
    names = ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE", "SLURMD_NODENAME")
    restart, rank, size, node = map(os.environ.get, names)
    pathlib.Path(f"up{restart}.{rank}").touch()
    print("round", restart, "rank", rank, "of", size, "on", node, flush=True)
    while not os.path.exists("leave"):
        time.sleep(0.05)
"""


def lose_node(user: User, number: int) -> None:
    """Kill a node's slurmd, its slurmstepds and all processes of jobs, as a power cut does."""
    user.slurm.kill_node(number)
    for stepd in user.slurm.stepd_pids():
        of_step = below(stepd)
        if any(environ(pid).get("SLURMD_NODENAME") == f"n{number}" for pid in of_step):
            kill_all([stepd, *of_step])


def test_job_goes_on_with_its_spare_node_when_slurm_loses_a_node(user: User) -> None:
    job = user.submit(GUEST, "--nodes", "2", "--spares", "1", "--max-restarts", "1")
    user.wait_for("up0.0", "up0.1", timeout=TEST_TIMEOUT)
    lose_node(user, 2)
    user.wait_for("up1.0", "up1.1", timeout=TEST_TIMEOUT)
    wait_until(
        lambda: user.slurm_job(job).get("NodeList") == "n[1,3]", TEST_TIMEOUT, "the node to be down"
    )
    assert user.job(job)["state"] == "RUNNING"
    place = user("exec", job, "--rank", "1", "--", "sh", "-c", "echo $RANK $SLURMD_NODENAME")
    assert place.stdout == "1 n3\n"
    user.path("leave").touch()
    end = user.wait_for_state(job, "SUCCEEDED", timeout=TEST_TIMEOUT)
    assert (end["nodes"], end["restarts"]) == (3, 1)
    assert "round 1 rank 1 of 2 on n3" in user.output(job)
    # srun reports the lost node's task; the script's exit code is that of the verdict.
    assert user.slurm.wait_for_job(user.slurm_id(job))["JobState"] == "COMPLETED"


def test_elastic_job_starts_with_the_nodes_that_slurm_has(user: User) -> None:
    user.slurm.run("scontrol", "update", "nodename=n4", "state=drain", "reason=test")
    try:
        job = user.submit(GUEST, "--nodes", "2:4", "--max-restarts", "1")
        user.wait_for("up0.0", "up0.1", "up0.2", timeout=TEST_TIMEOUT)
    finally:
        user.slurm.run("scontrol", "update", "nodename=n4", "state=resume")
    lose_node(user, 3)
    user.wait_for("up1.0", "up1.1", timeout=TEST_TIMEOUT)
    user.path("leave").touch()
    user.wait_for_state(job, "SUCCEEDED", timeout=TEST_TIMEOUT)
    assert "round 0 rank 2 of 3 on n3" in user.output(job)
    assert "round 1 rank 1 of 2 on n2" in user.output(job)


def test_requeued_job_leaves_out_the_node_that_caused_a_failure(user: User) -> None:
    job = user.submit(
        """
        import os, pathlib, sys, time
        attempt = os.environ.get("SLURM_RESTART_COUNT", "0")
        print("attempt", attempt, "on", os.environ["SLURMD_NODENAME"], flush=True)
        pathlib.Path("up" + attempt).touch()
        while attempt == "0":
            time.sleep(0.05)
            if os.path.exists("leave"):
                sys.exit(75)
        """,
        *("--requeue", "--exclude", "n4"),
    )  # fmt: skip
    user.wait_for("up0", timeout=TEST_TIMEOUT)
    ends.avoid(user.directory_of(job), "n1")
    number = user.slurm_id(job)
    user.slurm.run("scancel", "--signal=USR1", "--batch", number)
    user.path("leave").touch()

    def excluded() -> bool:
        return user.slurm_job(job).get("ExcNodeList") in ("n[1,4]", "n1,n4")

    wait_until(excluded, TEST_TIMEOUT, "the nodes to be left out")
    user.slurm.run("scontrol", "update", f"JobId={number}", "StartTime=now")
    user.wait_for_state(job, "SUCCEEDED", timeout=TEST_TIMEOUT)
    assert "attempt 1 on n2" in user.output(job)
