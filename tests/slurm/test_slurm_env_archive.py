"""Environments that travel under Slurm: two nodes of one machine share one environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import new_folder
from login_user import Laptop
from packed_env import MODULE, archive
from slurm_user import User

pytestmark = pytest.mark.slow

SCRIPT = f"""
    import sys, {MODULE}
    print(sys.executable, {MODULE}.VALUE)
"""


def check_archive(user: User, tmp_path: Path, *options: str) -> None:
    """Run a job on two nodes of one machine, which prepare one environment."""
    disk = new_folder(tmp_path / "disk")
    given = ("--env-archive", str(archive(tmp_path)), "--env-cache", str(disk))
    done = user.run(SCRIPT, "--nodes", "2", *given, *options)
    assert str(disk) in done.stdout, done
    assert len(list(disk.glob("clusterjob-env-*/*/complete"))) == 1


@pytest.mark.parametrize("launcher", ["agent", "srun"])
def test_nodes_of_one_machine_prepare_one_environment(
    user: User, tmp_path: Path, launcher: str
) -> None:
    check_archive(user, tmp_path, "--launcher", launcher)


def test_archive_is_sent_to_the_login_host(laptop: Laptop, tmp_path: Path) -> None:
    check_archive(laptop, tmp_path)
