"""Run clusterjob as a user of a real Slurm, with a work directory and a fast interpreter."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_user import CommandUser
from procs import kill_all, own_processes, wait_for_no_processes
from slurm_cluster import SlurmCluster, missing_packages
from ssh_network import python_without_torch

# Seconds; several times as long as two polls of Slurm by clusterjob, which polls every 5 s.
PROMPT = 30.0
COMMAND = Path(__file__).with_name("slurm_cluster.py")
STOPPING = 60.0  # seconds

# Creates the file up<RANK>, then sleeps.
SLEEPER = """
    import os, pathlib, time
    print("line of", os.environ["RANK"], flush=True)
    pathlib.Path(f"up{os.environ['RANK']}").touch()
    time.sleep(1000)
"""
# Creates the file up<RANK>, then waits for the file `leave`.
GUEST = """
    import os, pathlib, time
    print("line of", os.environ["RANK"], flush=True)
    pathlib.Path(f"up{os.environ['RANK']}").touch()
    while not os.path.exists("leave"):
        time.sleep(0.02)
    print("left", os.environ["RANK"], flush=True)
"""


class User(CommandUser):
    """A user on a login node.

    The jobs use an interpreter that cannot import torch and therefore starts ten times faster.
    """

    cluster = "slurm"

    def __init__(self, slurm: SlurmCluster, directory: Path, *more: Any) -> None:
        super().__init__(directory, *more)
        self.slurm = slurm
        self.python = python_without_torch(directory.parent)
        self.patch.setenv("CLUSTERJOB_PYTHON", str(self.python))

    def refused(self, *options: str, code: int = 1, command: str = "submit") -> str:
        """Return the error message for a refused job; fail if files or a job in Slurm remain."""
        jobs, files = self._queued(), self.remaining_files()
        message = self(command, *self.target, *options, self.script("pass"), code=code).stderr
        assert self._queued() <= jobs  # Slurm may have removed ended jobs meanwhile
        assert self.remaining_files() == files
        return message

    def _queued(self) -> set[str]:
        return set(
            self.slurm.run("squeue", "--noheader", "--states=all", "--format=%i").stdout.split()
        )

    def force_new_query(self) -> None:
        """Make the next command query Slurm, even if the snapshot is recent."""
        for path in self.home.glob("slurm/*.json"):
            path.unlink()

    def slurm_id(self, job_id: str) -> str:
        """Return Slurm's id of a job from the job's record."""
        return str(json.loads(self.record_of(job_id).read_text())["handle"]["id"])

    def slurm_job(self, job_id: str) -> dict[str, str]:
        return self.slurm.job(self.slurm_id(job_id))


@pytest.fixture
def user(slurm: SlurmCluster, new_user: Callable[..., User]) -> User:
    """Return a user of the cluster without accounting."""
    return new_user(slurm, User)


@pytest.fixture
def user_accounted(slurm_accounted: SlurmCluster, new_user: Callable[..., User]) -> User:
    """Return a user of the cluster with accounting."""
    return new_user(slurm_accounted, User)


# -- fixtures of a real Slurm: each cluster starts once, for the first test that needs it ----------


def _run_cluster(*options: str) -> Iterator[SlurmCluster]:
    """Start a cluster in a child process, which stops it even if this process is killed."""
    if missing := missing_packages(accounting="--accounting" in options):
        pytest.skip(f"{', '.join(missing)} missing: `make packages` installs it")
    # In /tmp for short paths: a socket's path has at most 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    keeper = subprocess.Popen(
        [sys.executable, str(COMMAND), "--dir", str(directory / "cluster"), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert keeper.stdin is not None
    try:
        if not keeper.stdout.readline().startswith("export SLURM_CONF="):
            pytest.fail(f"no Slurm: {keeper.communicate()[1]}", pytrace=False)
        yield SlurmCluster.attached(directory / "cluster")
    finally:
        _, errors = keeper.communicate(timeout=STOPPING)  # the end of its stdin stops it
        SlurmCluster(directory / "cluster").stop()  # in case the keeper was killed
        shutil.rmtree(directory)
    assert keeper.returncode == 0, (keeper.returncode, errors)


def _with_environment(cluster: SlurmCluster, patch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """Set the cluster's variables; afterwards cancel its jobs, and mend its daemons and nodes."""
    for name, value in cluster.environment.items():
        patch.setenv(name, value)
    try:
        yield cluster
    finally:
        cluster.restore()
        try:
            wait_for_no_processes(PROMPT)
        finally:
            kill_all(own_processes())


@pytest.fixture(scope="session")
def _slurm_none() -> Iterator[SlurmCluster]:
    yield from _run_cluster()


@pytest.fixture(scope="session")
def _slurm_dbd() -> Iterator[SlurmCluster]:
    yield from _run_cluster("--accounting")


@pytest.fixture
def slurm(_slurm_none: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """Return the cluster without accounting."""
    yield from _with_environment(_slurm_none, monkeypatch)


@pytest.fixture
def slurm_accounted(
    _slurm_dbd: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SlurmCluster]:
    """Return the cluster with slurmdbd and MariaDB."""
    yield from _with_environment(_slurm_dbd, monkeypatch)
