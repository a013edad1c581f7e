"""Queued Slurm jobs run the code that was submitted, although the files change meanwhile."""

from __future__ import annotations

import shlex
import sys

import pytest
from launching import new_folder, write_tree
from login_user import Laptop
from slurm_user import User

TRAIN = """
import os, sys, helper, pack.part
print("ran", {version!r}, helper.VERSION, pack.part.VERSION, open("data.txt").read(), flush=True)
print("cwd", os.getcwd(), flush=True)
"""
SUBMITTED = "ran 1 1 1 new"  # data is read from the working directory when the job runs
CURRENT = "ran 2 2 2 new"


def write_version(user: User, version: int) -> None:
    pack = new_folder(user.path("pack"))
    user.path("train.py").write_text(TRAIN.format(version=version))
    user.path("helper.py").write_text(f"VERSION = {version}\n")
    write_tree(
        pack,
        **{
            "__init__.py": "",
            "part.py": f"VERSION = {version}\n",
            "main.py": TRAIN.format(version=version),
        },
    )
    user.path("run.sh").write_text(
        f'echo "shell {version}"; {shlex.quote(sys.executable)} train.py'
    )
    user.path("data.txt").write_text("old" if version == 1 else "new")


def submit(user: User, *words: str) -> str:
    return user("submit", "--cluster", "slurm", "--set", "hold=true", *words).stdout.strip()


def outputs_after_edit(user: User, *forms: tuple[str, ...]) -> dict[str, list[str]]:
    """Submit held jobs, edit all files, release the jobs; return the lines of each job."""
    write_version(user, 1)
    ids = [submit(user, *form) for form in forms]
    write_version(user, 2)
    user.slurm.run("scontrol", "release", *map(user.slurm_id, ids))
    for job_id in ids:
        user.wait_for_state(job_id, "SUCCEEDED")
    return {job_id: user.output(job_id).splitlines() for job_id in ids}


def test_held_jobs_run_submitted_script_module_and_shell_script(user: User) -> None:
    outputs = outputs_after_edit(
        user,
        ("train.py",),
        ("-m", "pack.main"),
        ("--", "bash", "run.sh"),
        ("--no-snapshot", "train.py"),
    )
    script, module, shell, current = outputs.values()
    here = f"cwd {user.directory}"
    assert script == [SUBMITTED, here]
    assert module == [SUBMITTED, here]
    assert shell == ["shell 1", SUBMITTED, here]
    assert current == [CURRENT, here]
    ids = list(outputs)
    codes = [user.job(job_id)["code"] for job_id in ids]
    assert codes[3] is None
    assert codes[0]["digest"] == codes[1]["digest"] == codes[2]["digest"]
    assert len(codes[0]["digest"]) == 64
    assert codes[0]["git"] is None


@pytest.mark.slow
def test_held_job_of_srun_launcher_runs_submitted_code(user: User) -> None:
    options = ("--python", sys.executable, "--launcher", "srun", "-m", "pack.main")
    [lines] = outputs_after_edit(user, options).values()
    assert lines == [SUBMITTED, f"cwd {user.directory}"]


@pytest.mark.slow
def test_held_job_of_login_host_runs_submitted_code(laptop: Laptop) -> None:
    write_version(laptop, 1)
    note = "--no-snapshot: the hosts run a copy of the code"
    done = laptop(
        "submit", "--cluster", "hpc", "--set", "hold=true", "--no-snapshot", "-m", "pack.main"
    )
    assert note in done.stderr
    job_id = done.stdout.strip()
    write_version(laptop, 2)
    laptop.slurm.run("scontrol", "release", laptop.slurm_id(job_id))
    laptop.wait_for_state(job_id, "SUCCEEDED")
    assert laptop.output(job_id).splitlines() == [
        "ran 1 1 1 old",  # the data is sent along
        f"cwd {laptop.there(job_id) / 'code'}",
    ]
    code = laptop.job(job_id)["code"]
    assert (code["files"], len(code["digest"])) == (7, 64)
