"""Environments on SSH hosts: an archive is sent once to each host and prepared there."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from packed_env import MODULE, archive
from sshsite import Site, output_lines

from clusterjob.core import jobs
from clusterjob.errors import SubmitError
from clusterjob.node.program import Program

pytestmark = pytest.mark.slow

SCRIPT = f"import sys, {MODULE}; print(sys.executable, {MODULE}.VALUE)"


def stored(site: Site, path: Path) -> list[int]:
    """Return the inode of an archive in the store of each host."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return [
        (host.home / ".clusterjob" / "store" / digest[:2] / digest).stat().st_ino
        for host in (site.ssh_network.hosts["gpu1"], site.ssh_network.hosts["gpu2"])
    ]


def test_archive_is_sent_once_to_each_host_and_unpacked_there(site: Site, tmp_path: Path) -> None:
    path = archive(tmp_path)
    (tmp_path / "disk").mkdir()
    more = {"env_archive": str(path), "env_cache": str(tmp_path / "disk"), "python": None}
    lines = output_lines(site.submit(SCRIPT, **more))
    assert len(lines) == 2
    assert all(str(tmp_path / "disk") in line and line.endswith(" 1") for line in lines), lines
    before = stored(site, path)
    assert len(output_lines(site.submit(SCRIPT, **more))) == 2
    after = stored(site, path)
    assert after == before, "the archive is not sent again"


def test_damaged_archive_stops_the_submission_with_its_reason(site: Site, tmp_path: Path) -> None:
    path = archive(tmp_path)
    path.write_bytes(path.read_bytes()[:-300])
    (tmp_path / "disk").mkdir()
    plan = site.plan(
        Program("script", site.script(SCRIPT)),
        env_archive=str(path),
        env_cache=str(tmp_path / "disk"),
        python=None,
    )
    with pytest.raises(SubmitError, match="unexpected end of file"):
        jobs.submit(plan, "ssh", detach=True)
    assert not site.running()
