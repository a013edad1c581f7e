"""Fixtures that give a test a real Slurm: one cluster without accounting, one with, each started
once, when the first test wants it.

A test takes ``slurm``, ``slurm_accounted``, or ``slurm_cluster``, which runs it in both worlds. It
finds the cluster's variables in its environment; when it ends, its jobs are cancelled and whatever
it has killed or frozen runs again.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster

COMMAND = Path(__file__).with_name("slurm_cluster.py")
STOPPING = 60.0  # seconds


def _started(*options: str) -> Iterator[SlurmCluster]:
    """Have a process start a cluster, which stops it when this one is gone, however it ends."""
    # Under /tmp, for the sake of short paths: a socket's has 107 bytes at most.
    directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    keeper = subprocess.Popen(
        [sys.executable, str(COMMAND), "--dir", str(directory / "cluster"), *options],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    try:
        if not keeper.stdout.readline().startswith("export SLURM_CONF="):
            pytest.fail(f"no Slurm: {keeper.communicate()[1]}", pytrace=False)
        yield SlurmCluster.attached(directory / "cluster")
    finally:
        keeper.communicate(timeout=STOPPING)  # the end of its standard input is what it waits for
        SlurmCluster(directory / "cluster").stop()  # nothing is left, unless the keeper was killed
        shutil.rmtree(directory)
    assert keeper.returncode == 0


def _lent(cluster: SlurmCluster, patch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    for name, value in cluster.environment.items():
        patch.setenv(name, value)
    try:
        yield cluster
    finally:
        cluster.restore()


@pytest.fixture(scope="session")
def _slurm_none() -> Iterator[SlurmCluster]:
    yield from _started()


@pytest.fixture(scope="session")
def _slurm_dbd() -> Iterator[SlurmCluster]:
    yield from _started("--accounting")


@pytest.fixture(scope="session", params=["none", "slurmdbd"])
def _slurm_either(request: pytest.FixtureRequest) -> SlurmCluster:
    cluster: SlurmCluster = request.getfixturevalue(
        "_slurm_none" if request.param == "none" else "_slurm_dbd"
    )
    return cluster


@pytest.fixture
def slurm(_slurm_none: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """Lend the test the cluster that has no accounting."""
    yield from _lent(_slurm_none, monkeypatch)


@pytest.fixture
def slurm_accounted(
    _slurm_dbd: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SlurmCluster]:
    """Lend the test the cluster that has slurmdbd and MariaDB."""
    yield from _lent(_slurm_dbd, monkeypatch)


@pytest.fixture
def slurm_cluster(
    _slurm_either: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SlurmCluster]:
    """Lend the test one cluster and then, in another run of it, the other."""
    yield from _lent(_slurm_either, monkeypatch)
