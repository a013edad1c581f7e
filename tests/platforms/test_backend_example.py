"""The example backend of docs/backends.md: after its installation, a queue is a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import ROOT, Run, run, write_tree
from procs import TEST_TIMEOUT, wait_until

EXAMPLE = ROOT / "examples" / "backend"
TRAIN = """
import sys, torch, torch.distributed as dist
from clusterjob import bootstrap
with bootstrap.init(timeout=90) as ctx:
    value = torch.ones(1)
    dist.all_reduce(value)
    print(f"rank {ctx.rank} of {value.item():.0f} on node {ctx.node_rank}", *sys.argv[1:])
"""
WAIT = "import time; print('up', flush=True); time.sleep(600)"


@pytest.fixture(scope="module")
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the example as a user does, into a directory of its own."""
    directory = tmp_path_factory.mktemp("installed")
    options = [
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--disable-pip-version-check",
        "--quiet",
        "--target",
        directory,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, EXAMPLE],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return directory


class User:
    """A user who has installed the package and the queue."""

    def __init__(self, directory: Path, installed: Path) -> None:
        self._directory = directory
        self._environ = {
            "PYTHONPATH": f"{installed}{os.pathsep}{ROOT}",
            "PATH": f"{installed / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "TINYQ_HOME": str(directory / "queue"),
            "CLUSTERJOB_HOME": os.environ["CLUSTERJOB_HOME"],
            "XDG_CONFIG_HOME": os.environ["XDG_CONFIG_HOME"],
        }  # fmt: skip

    def clusterjob(self, *arguments: str, code: int | None = None) -> Run:
        argv = [sys.executable, "-m", "clusterjob", *arguments]
        return run(argv, self._directory / "work", self._environ, code=code)

    def queue(self, *arguments: str) -> Run:
        return run(["tinyq", *arguments], self._directory, self._environ)

    def tasks(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = json.loads(self.queue("list").out)
        return found


@pytest.fixture
def user(_installed: Path, tmp_path: Path) -> Iterator[User]:
    write_tree(tmp_path, **{"work/train.py": TRAIN})
    user_of_queue = User(tmp_path, _installed)
    yield user_of_queue
    for task in user_of_queue.tasks():
        user_of_queue.queue("cancel", str(task["id"]))
    wait_until(lambda: all(task["ended"] for task in user_of_queue.tasks()), TEST_TIMEOUT)


FLAGS = (
    "--cluster",
    "tinyq",
    "--set",
    "poll=0.2",
    "--nodes",
    "2",
    "--nproc-per-node",
    "2",
    "--python",
    sys.executable,
)


def test_job_runs_on_queue(user: User) -> None:
    ran = user.clusterjob("run", *FLAGS, "--setup", "echo setting up", "train.py", "it's", code=0)
    assert sorted(ran.out.splitlines()) == [
        f"[{rank}] rank {rank} of 4 on node {rank // 2} it's" for rank in range(4)
    ]
    (task,) = user.tasks()
    job = str(task["name"])
    assert task["state"] == "succeeded"
    assert user.clusterjob("logs", "--rank", "3", job).out == "[3] rank 3 of 4 on node 1 it's\n"
    assert "SUCCEEDED" in user.clusterjob("status", job).out
    folder = Path(os.environ["CLUSTERJOB_HOME"]) / "jobs" / job
    assert not (folder / "upload").exists()
    assert not (folder / "token").exists()


def test_secret_reaches_workers_and_no_file_of_job(user: User, tmp_path: Path) -> None:
    write_tree(
        tmp_path, **{"key": "5ecret", "work/tell.py": "import os; print(os.environ['KEY'][::-1])"}
    )
    options = ("--nproc-per-node", "1", "--nodes", "1", "--start", "exec")
    ran = user.clusterjob("run", *FLAGS, *options, "--secret", f"KEY={tmp_path / 'key'}", "tell.py")
    assert (ran.code, ran.out) == (0, "terce5\n"), ran.err
    files = [path for path in Path(os.environ["CLUSTERJOB_HOME"]).rglob("*") if path.is_file()]
    assert [path for path in files if b"5ecret" in path.read_bytes()] == []


def test_job_on_queue_can_be_cancelled(user: User, tmp_path: Path) -> None:
    (tmp_path / "work" / "wait.py").write_text(WAIT)
    ran = user.clusterjob("submit", *FLAGS, "--start", "exec", "wait.py", code=0)
    job = ran.out.split()[-1]
    wait_until(lambda: "] up" in user.clusterjob("logs", job).out, TEST_TIMEOUT)
    assert user.clusterjob("cancel", job).code == 0
    assert user.clusterjob("wait", job).code == 143
    assert "CANCELLED" in user.clusterjob("status", job).out


def test_dry_run_shows_task_and_unknown_option_is_refused(user: User) -> None:
    ran = user.clusterjob("submit", "--dry-run", *FLAGS, "train.py", code=0)
    assert '"workers": 2' in ran.out
    assert "tinyq submit" in ran.out
    assert "### code: " in ran.out
    assert user.tasks() == []
    ran = user.clusterjob("submit", *FLAGS, "--set", "partition=x", "train.py")
    assert ran.code != 0
    assert "unknown option 'partition' for the tinyq cluster" in ran.err
