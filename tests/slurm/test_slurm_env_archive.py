"""Environments that travel under Slurm: two nodes of one machine share one environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from login_user import Laptop
from packed_env import MODULE, archive
from slurm_user import User

pytestmark = pytest.mark.slow

SCRIPT = f"""
    import sys, {MODULE}
    print(sys.executable, {MODULE}.VALUE)
"""


@pytest.mark.parametrize("launcher", ["agent", "srun"])
def test_nodes_of_one_machine_prepare_one_environment(
    user: User, tmp_path: Path, launcher: str
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ("--env-archive", str(archive(tmp_path)), "--env-cache", str(disk))
    done = user.run(SCRIPT, "--nodes", "2", "--launcher", launcher, *options)
    lines = done.stdout.splitlines()
    assert sum(str(disk) in line for line in lines) >= 1, done
    assert len(list(disk.glob("clusterjob-env-*/*/complete"))) == 1


def test_archive_is_sent_to_the_login_host(laptop: Laptop, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ("--env-archive", str(archive(tmp_path)), "--env-cache", str(disk))
    done = laptop.run(SCRIPT, "--nodes", "2", *options)
    assert str(disk) in done.stdout, done
    assert len(list(disk.glob("clusterjob-env-*/*/complete"))) == 1
