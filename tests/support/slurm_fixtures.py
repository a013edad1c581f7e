"""Fixtures for a real Slurm: one cluster without accounting and one with it.

Each cluster starts once, for the first test that needs it. A test uses ``slurm``,
``slurm_accounted``, or ``slurm_cluster``, which runs the test with both. The fixtures set the
cluster's environment variables. After the test, they cancel its jobs, restart daemons that it has
killed and resume those that it has frozen.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, missing_packages

COMMAND = Path(__file__).with_name("slurm_cluster.py")
STOPPING = 60.0  # seconds


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
    assert keeper.stdout is not None
    try:
        if not keeper.stdout.readline().startswith("export SLURM_CONF="):
            pytest.fail(f"no Slurm: {keeper.communicate()[1]}", pytrace=False)
        yield SlurmCluster.attached(directory / "cluster")
    finally:
        keeper.communicate(timeout=STOPPING)  # the end of its stdin stops it
        SlurmCluster(directory / "cluster").stop()  # in case the keeper was killed
        shutil.rmtree(directory)
    assert keeper.returncode == 0


def _with_environment(cluster: SlurmCluster, patch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    for name, value in cluster.environment.items():
        patch.setenv(name, value)
    try:
        yield cluster
    finally:
        cluster.restore()


@pytest.fixture(scope="session")
def _slurm_none() -> Iterator[SlurmCluster]:
    yield from _run_cluster()


@pytest.fixture(scope="session")
def _slurm_dbd() -> Iterator[SlurmCluster]:
    yield from _run_cluster("--accounting")


@pytest.fixture(scope="session", params=["none", "slurmdbd"])
def _slurm_either(request: pytest.FixtureRequest) -> SlurmCluster:
    cluster: SlurmCluster = request.getfixturevalue(
        "_slurm_none" if request.param == "none" else "_slurm_dbd"
    )
    return cluster


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


@pytest.fixture
def slurm_cluster(
    _slurm_either: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SlurmCluster]:
    """Run the test twice: without and with accounting."""
    yield from _with_environment(_slurm_either, monkeypatch)
