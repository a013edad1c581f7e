"""Commands and shells inside a Slurm job, here and through a login host."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from inside_job import Inside, get, get_at_once
from launching import HOST
from login_user import GUEST as MEETING
from login_user import Laptop
from procs import TEST_TIMEOUT
from slurm_user import GUEST, SLEEPER, User
from stacked import LIMIT, NOISE, WAITING, check_stacks


def started(user: User, *options: str, text: str = SLEEPER, ranks: int = 4) -> Inside:
    job_id = user.submit(
        text,
        "--nodes",
        "2",
        "--nproc-per-node",
        "2",
        *options,
        until=[f"up{rank}" for rank in range(ranks)],
    )
    return Inside(job_id, user.directory)


def test_exec_runs_in_step_of_job_and_killed_client_leaves_nothing(user: User) -> None:
    job = started(user)
    number = user.job(job.id)["backend_id"]
    job.check_exec("$SLURMD_NODENAME $SLURM_JOB_ID $PWD", f"n2 {number} {user.directory}")
    job.check_killed_client(node=1)
    job.check_shell(rank=2, where="echo $SLURMD_NODENAME", answer="n2")
    assert user.job(job.id)["state"] == "RUNNING"
    user("cancel", job.id)


def test_stacks_of_16_ranks_in_2_steps_are_read_and_saved_before_scancel(user: User) -> None:
    job_id = user.submit(
        WAITING,
        "--nodes",
        "2",
        "--nproc-per-node",
        "8",
        until=[f"up{rank}" for rank in range(16)],
    )
    job = Inside(job_id, user.directory)
    assert check_stacks(job, 16, [HOST] * 2) < LIMIT * NOISE
    user("cancel", "--stacks", job_id)
    user.wait_for_state(job_id, "CANCELLED")
    ranks = json.loads((user.directory_of(job_id) / "logs/node0/stacks.json").read_text())["ranks"]
    assert [(each["rank"], each["node_rank"], each["answered"]) for each in ranks] == [
        (rank, rank // 8, True) for rank in range(16)
    ]
    assert "stacks of 16 ranks: logs/node0/stacks.txt" in user("status", job_id).stdout


def test_forward_shares_steps_and_ends_with_job(user: User) -> None:
    job = started(user)
    with (
        job.served(1, sys.executable) as (server, port),
        job.forwarded(f"0:{port}", "--node", "1") as (forward, [local]),
    ):
        for _ in range(2):
            assert get_at_once(local, "up3") == {b""}
        assert get(local, "script.py").endswith(b"time.sleep(1000)\n")
        user("cancel", job.id)
        assert forward.wait(TEST_TIMEOUT) == 255
        assert server.wait(TEST_TIMEOUT) == 255


@pytest.mark.slow
def test_workers_of_srun_and_elements_of_arrays_are_found(user: User) -> None:
    options = ("--launcher", "srun", "--python", sys.executable)
    job = started(user, *options, text=WAITING)
    assert job.shell("echo $RANK $SLURMD_NODENAME", "--rank", "3") == "3 n2\n"
    _, err = job.exec("--rank", "4", "true", code=2)
    assert b"has no rank 4" in err
    check_stacks(job, 4, [HOST] * 2)
    user("cancel", job.id)
    text = GUEST.replace(
        "f\"up{os.environ['RANK']}\"", "'at' + os.environ['CLUSTERJOB_ARRAY_INDEX']"
    )
    array = user.submit(text, "--array", "0-1", until=("at0", "at1"))
    element = Inside(f"{array}_1", user.directory)
    assert element.shell("echo $CLUSTERJOB_ARRAY_INDEX $CLUSTERJOB_JOB_ID") == f"1 {array}_1\n"
    error = user("metrics", array, code=2).stderr
    assert "is an array: each element has its own metrics" in error
    _, err = Inside(array, user.directory).exec("true", code=2)
    assert err.decode() == (
        f"clusterjob: error: job {array} is an array: each element has its own workers\n"
        f"  hint: name one, such as {array}_0\n"
    )
    user.path("leave").touch()
    user("wait", array)


@pytest.mark.slow
def test_login_host_runs_command_and_shell(laptop: Laptop) -> None:
    job_id = laptop.submit(
        MEETING, "--nodes", "2", "--nproc-per-node", "2", until=("up0", "up1", "up2", "up3")
    )
    job = Inside(job_id, laptop.directory)
    job.check_exec("$SLURMD_NODENAME $PWD", f"n2 {laptop.there(job_id) / 'code'}")
    job.check_shell(rank=2, where="echo $SLURMD_NODENAME", answer="n2")
    laptop.leave()
    laptop("wait", job_id)


@pytest.mark.slow
def test_command_enters_container_of_worker(user: User) -> None:
    """A fake apptainer runs the job in real namespaces, with its own file system at /mnt."""
    namespaces = "--mount --user --map-root-user" if user_namespaces_work() else "--mount"
    user.command_first_on_path(
        "apptainer",
        'while [ "$1" != bash ]; do shift; done\n'
        f"exec unshare {namespaces} sh -c 'mount -t tmpfs tmpfs /mnt && "
        'touch /mnt/image && exec "$@"\' sh "$@"\n',
    )
    user.path("image.sif").touch()
    job = started(user, "--container", "image.sif", "--python", str(user.python))
    assert job.shell("ls /mnt; pwd; echo $RANK", "--rank", "2") == f"image\n{user.directory}\n2\n"
    job.exec("/no/such/program", code=127)
    user("cancel", job.id)


def user_namespaces_work() -> bool:
    return subprocess.run(["unshare", "--user", "true"], check=False).returncode == 0
