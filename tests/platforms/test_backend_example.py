"""The example of docs/backends.md: a queue of its own becomes a cluster by installing a package,
and runs real jobs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import ROOT, Run, run
from procs import PATIENCE

EXAMPLE = ROOT / "examples" / "backend"
TRAIN = """
import sys, time, torch, torch.distributed as dist
from clusterjob import bootstrap
with bootstrap.init(timeout=90) as ctx:
    value = torch.ones(1)
    dist.all_reduce(value)
    print(f"rank {ctx.rank} of {value.item():.0f} on node {ctx.node_rank}", *sys.argv[1:])
    if "fail" in sys.argv and ctx.rank == 1:
        raise ValueError("boom")
    if "wait" in sys.argv:
        time.sleep(600)
"""


@pytest.fixture(scope="module")
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the example as a user does, into a place of its own."""
    place = tmp_path_factory.mktemp("installed")
    words = [
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--disable-pip-version-check",
        "--quiet",
        "--target",
        place,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *words, EXAMPLE],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return place


class User:
    """Somebody with the package and the queue."""

    def __init__(self, directory: Path, installed: Path) -> None:
        self._directory = directory
        self._more = {
            "PYTHONPATH": f"{installed}{os.pathsep}{ROOT}",
            "PATH": f"{installed / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "TINYQ_HOME": str(directory / "queue"),
            "CLUSTERJOB_HOME": os.environ["CLUSTERJOB_HOME"],
            "XDG_CONFIG_HOME": os.environ["XDG_CONFIG_HOME"],
        }  # fmt: skip

    def clusterjob(self, *words: str) -> Run:
        return run(
            [sys.executable, "-m", "clusterjob", *words], self._directory / "work", self._more
        )

    def queue(self, *words: str) -> Run:
        return run(["tinyq", *words], self._directory, self._more)

    def tasks(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = json.loads(self.queue("list").out)
        return found


@pytest.fixture
def user(_installed: Path, tmp_path: Path) -> Iterator[User]:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text(TRAIN)
    made = User(tmp_path, _installed)
    yield made
    for task in made.tasks():
        made.queue("cancel", str(task["id"]))
    _wait_for(lambda: all(task["ended"] for task in made.tasks()))


def _wait_for(is_so) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)


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


def test_a_job_runs_on_the_queue(user: User) -> None:
    ran = user.clusterjob("run", *FLAGS, "--setup", "echo setting up", "train.py", "it's")
    assert ran.code == 0, ran.err + ran.out
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


@pytest.mark.slow
def test_a_failure_is_the_rank_s_after_the_queue_has_tried_again(user: User) -> None:
    ran = user.clusterjob("run", *FLAGS, "--max-restarts", "1", "train.py", "fail")
    assert ran.code == 1, ran.err + ran.out
    assert "rank 1 (node 0, local rank 1" in ran.err
    assert "ValueError: boom" in ran.err
    tasks = user.tasks()
    assert [task["state"] for task in tasks] == ["failed", "failed"]
    assert len({task["name"] for task in tasks}) == 1
    assert (
        user.clusterjob("logs", "--rank", "2", str(tasks[0]["name"])).out.count("rank 2 of 4") == 2
    )


def test_a_job_is_cancelled(user: User) -> None:
    ran = user.clusterjob("submit", *FLAGS, "train.py", "wait")
    assert ran.code == 0, ran.err
    job = ran.out.split()[-1]
    _wait_for(lambda: "rank 0 of 4" in user.clusterjob("logs", job).out)
    assert user.clusterjob("cancel", job).code == 0
    assert user.clusterjob("wait", job).code == 143
    assert "CANCELLED" in user.clusterjob("status", job).out


def test_a_dry_run_shows_the_task_and_what_it_does_not_know_is_refused(user: User) -> None:
    ran = user.clusterjob("submit", "--dry-run", *FLAGS, "train.py")
    assert ran.code == 0, ran.err
    assert '"workers": 2' in ran.out
    assert "tinyq submit" in ran.out
    assert user.tasks() == []
    ran = user.clusterjob("submit", *FLAGS, "--set", "partition=x", "train.py")
    assert ran.code != 0
    assert "the tinyq cluster knows no option 'partition'" in ran.err
