"""Directories of jobs and records belong to the user alone, under every umask and in every place."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from procs import PATIENCE

from clusterjob.core.records import home, secure_home
from clusterjob.errors import RecordError
from clusterjob.node.system import private_dirs

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a second user needs root")


def submit(
    tmp_path: Path, umask: int = 0o022, **variables: str
) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "clusterjob", "run", "--cluster", "local", "--", "true"]
    env = {**os.environ, **variables}
    return subprocess.run(
        argv,
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        preexec_fn=lambda: os.umask(umask),
    )


def modes(place: Path) -> dict[str, int]:
    """Return the permission bits of a directory and of all that is below it."""
    return {
        str(path): stat.S_IMODE(path.lstat().st_mode)
        for path in (place, *place.rglob("*"))
        if not path.is_symlink()
    }


@pytest.fixture
def reachable() -> Iterator[Path]:
    """Return a directory into which another user may go, unlike those of pytest."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize("given", [True, False])
def test_every_level_is_the_users_alone_under_umask_000(
    reachable: Path, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = reachable / "a"
    if given:
        monkeypatch.setenv("CLUSTERJOB_HOME", str(base / "b" / "c"))
    else:
        monkeypatch.delenv("CLUSTERJOB_HOME")
        monkeypatch.setenv("XDG_STATE_HOME", str(base / "b"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(base / "cache"))
    done = submit(reachable, umask=0)
    assert done.returncode == 0, done.stderr
    found = modes(base)
    directories = {path: mode for path, mode in found.items() if Path(path).is_dir()}
    assert len(directories) > 6
    assert {path: oct(mode) for path, mode in directories.items() if mode & 0o077} == {}
    script = 'for path; do [ -r "$path" ] || [ -w "$path" ] || [ -x "$path" ] && echo "$path"; done'
    as_another = subprocess.run(["/bin/sh", "-c", script, "sh", *found, str(reachable)], user=NOBODY, group=NOBODY, extra_groups=[],
                                cwd="/", capture_output=True, text=True, check=False)  # fmt: skip
    assert as_another.stdout == f"{reachable}\n", "what another user can use of these"


def foreign(place: Path) -> None:
    place.mkdir()
    os.chown(place, NOBODY, NOBODY)


def open_to_all(place: Path) -> None:
    place.mkdir()
    place.chmod(0o777)


def open_to_a_group(place: Path) -> None:
    place.mkdir()
    os.chown(place, 0, 12345)
    place.chmod(0o770)


def link_of_another(place: Path) -> None:
    target = place.parent / "target"
    target.mkdir()
    place.symlink_to(target)
    os.lchown(place, NOBODY, NOBODY)


def below_a_directory_of_all(place: Path) -> None:
    place.parent.chmod(0o777)


def below_a_directory_of_another(place: Path) -> None:
    os.chown(place.parent, NOBODY, NOBODY)


def planted_jobs(place: Path) -> None:
    place.mkdir()
    foreign(place / "jobs")


def planted_records(place: Path) -> None:
    place.mkdir()
    foreign(place / "records")


@pytest.mark.parametrize(
    ("plant", "why"),
    [
        (foreign, "it belongs to nobody (uid 65534)"),
        (open_to_all, "everyone can write to it (mode 0777)"),
        (open_to_a_group, "its group can write to it (mode 0770)"),
        (link_of_another, "it belongs to nobody (uid 65534)"),
        (below_a_directory_of_all, "could put another directory in its place"),
        (below_a_directory_of_another, "uid 65534 owns"),
        (planted_jobs, "it belongs to nobody (uid 65534)"),
        (planted_records, "it belongs to nobody (uid 65534)"),
    ],
)
def test_submit_refuses_a_place_that_others_can_change(
    tmp_path: Path, plant: Callable[[Path], None], why: str
) -> None:
    place = tmp_path / "shared" / "home"
    place.parent.mkdir()
    plant(place)
    done = submit(tmp_path, CLUSTERJOB_HOME=str(place))
    assert done.returncode == 1, done
    assert f"clusterjob: error: {place}" in done.stderr
    assert why in done.stderr
    assert "hint: " in done.stderr
    assert not any((place / "jobs").glob("*"))


def test_a_sticky_directory_of_all_is_safe_where_the_rest_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o1777)
    monkeypatch.setenv("CLUSTERJOB_HOME", str(tmp_path))
    secure_home()
    assert {
        path.name: oct(mode & 0o777) for path in tmp_path.iterdir() if (mode := path.stat().st_mode)
    } == {"jobs": "0o700", "records": "0o700"}


def test_directories_of_an_older_version_under_a_generous_umask_are_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CLUSTERJOB_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for folder in (home(), home() / "jobs", home() / "records"):
        folder.mkdir()
        folder.chmod(0o777)
    secure_home()
    assert [
        oct(folder.stat().st_mode & 0o777)
        for folder in (home(), home() / "jobs", home() / "records")
    ] == ["0o755"] * 3


def test_a_place_that_cannot_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CLUSTERJOB_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(RecordError, match="file cannot be written: Not a directory"):
        secure_home()


def test_a_group_of_the_user_alone_may_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    assert private_dirs.danger(tmp_path) == ""
    os.chown(tmp_path, 0, 12345)
    assert private_dirs.danger(tmp_path) == "its group can write to it (mode 0770)"
