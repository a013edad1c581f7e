"""`rerun --failed` of an array, and `clean`, under a real Slurm, also behind a login host."""

from __future__ import annotations

import re

import pytest
from login_user import Laptop
from slurm_user import User

pytestmark = pytest.mark.slow

# Elements 1 and 3 fail in the first job only.
SWEEP = """
    import os, pathlib, sys
    index = int(os.environ["CLUSTERJOB_ARRAY_INDEX"])
    print(index, *sys.argv[1:])
    mark = pathlib.Path(f"failed{index}")
    if index % 2 and not mark.exists():
        mark.touch()
        sys.exit(5)
"""


def test_failed_elements_are_repeated_with_their_indices_and_arguments(user: User) -> None:
    first = user.submit(SWEEP, "--sweep", "lr=a,b,c,d")
    user("wait", first, code=5)
    second = user("rerun", first, "--failed").stdout.strip()
    done = user("wait", second)
    assert sorted(re.findall(r"job (\S+) (\w+)", done.stderr)) == [
        (f"{second}_1", "SUCCEEDED"),
        (f"{second}_3", "SUCCEEDED"),
    ]
    assert user.output(f"{second}_3") == "3 --lr=d\n"
    third = user("rerun", f"{second}_3").stdout.strip()
    user("wait", third)
    assert user.output(f"{third}_3") == "3 --lr=d\n"
    assert "has failed" in user("rerun", second, "--failed", code=2).stderr


def test_clean_keeps_job_in_queue_and_removes_ended_array(user: User) -> None:
    waiting = user.submit("print(1)", "--set", "hold=true")
    array = user.submit("print(1)", "--array", "0-2")
    user("wait", array)
    user("clean", "--all", "--yes")
    assert [job["id"] for job in user.jobs()] == [waiting]
    assert not user.directory_of(waiting).with_name(array).exists()
    assert user.directory_of(waiting).is_dir()
    user("cancel", waiting)


def test_clean_keeps_ended_job_that_its_owner_queued_again(user: User) -> None:
    job_id = user.submit("print(1)", "--requeue")
    user("wait", job_id)
    slurm_id = user.slurm_id(job_id)
    user.slurm.run("scontrol", "requeuehold", slurm_id)
    user.force_new_query()
    done = user("clean", job_id, "--yes", code=1)
    assert "is in Slurm's queue" in done.stderr
    assert user.directory_of(job_id).is_dir()
    user.slurm.run("scancel", slurm_id)


def test_clean_keeps_jobs_of_unreachable_login_host(laptop: Laptop) -> None:
    job_id = laptop.submit("print(1)")
    laptop("wait", job_id)
    laptop.login.stop(close_connections=True)
    done = laptop("clean", "--all", "--yes", code=1)
    assert f"job {job_id} is kept: " in done.stderr
    laptop.login.start()
    assert laptop.there(job_id).is_dir()
    assert [job["id"] for job in laptop.jobs()] == [job_id]
