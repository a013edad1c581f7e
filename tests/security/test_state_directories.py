"""Job and record directories are private to the user under every umask and location."""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import CLUSTERJOB
from procs import TEST_TIMEOUT

from clusterjob.core.records import home, secure_home
from clusterjob.errors import ClusterJobError
from clusterjob.node.system import private_dirs

NOBODY = 65534
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="a second user needs root"),
    pytest.mark.usefixtures("plain_python"),
]


def modes(folder: Path) -> dict[str, int]:
    """Return the permission bits of a directory and everything below it."""
    return {
        str(path): stat.S_IMODE(path.lstat().st_mode)
        for path in (folder, *folder.rglob("*"))
        if not path.is_symlink()
    }


@pytest.fixture
def reachable() -> Iterator[Path]:
    """Return a directory that other users can enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize("given", [True, False])
def test_all_state_directories_are_private_under_umask_000(
    reachable: Path, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = reachable / "a"
    if given:
        monkeypatch.setenv("CLUSTERJOB_HOME", str(base / "b" / "c"))
    else:
        monkeypatch.delenv("CLUSTERJOB_HOME")
        monkeypatch.setenv("XDG_STATE_HOME", str(base / "b"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(base / "cache"))
    monkeypatch.chdir(reachable)
    subprocess.run(
        [*CLUSTERJOB, "run", "--cluster", "local", "--", "true"],
        check=True,
        timeout=TEST_TIMEOUT,
        preexec_fn=lambda: os.umask(0),
    )
    found = modes(base)
    directories = {path: mode for path, mode in found.items() if Path(path).is_dir()}
    assert len(directories) > 6
    assert {path: oct(mode) for path, mode in directories.items() if mode & 0o077} == {}
    script = 'for path; do [ -r "$path" ] || [ -w "$path" ] || [ -x "$path" ] && echo "$path"; done'
    as_nobody = subprocess.run(
        ["/bin/sh", "-c", script, "sh", *found, str(reachable)],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert as_nobody.stdout == f"{reachable}\n", "another user can access one of these"


def owned_by(folder: Path, user: int, group: int = NOBODY, mode: int = 0o755) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    os.chown(folder, user, group)
    folder.chmod(mode)


@pytest.mark.parametrize(
    ("plant", "why"),
    [
        (lambda home: owned_by(home, NOBODY), "it belongs to uid 65534"),
        (lambda home: owned_by(home, 0, mode=0o777), "everyone can write to it (mode 0777)"),
        (lambda home: owned_by(home, 0, 12345, 0o770), "its group can write to it (mode 0770)"),
        (
            lambda home: owned_by(home.parent, 0, mode=0o777),
            "could put another directory in its place",
        ),
        (lambda home: owned_by(home.parent, NOBODY), "uid 65534 owns"),
        (lambda home: owned_by(home / "records", NOBODY), "it belongs to uid 65534"),
    ],
    ids=["owner", "everyone", "group", "parent", "owner of parent", "owner of records"],
)
def test_submit_refuses_home_that_other_users_can_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[Path], None], why: str
) -> None:
    home = tmp_path / "shared" / "home"
    home.parent.mkdir()
    plant(home)
    monkeypatch.setenv("CLUSTERJOB_HOME", str(home))
    with pytest.raises(ClusterJobError) as caught:
        secure_home()
    assert caught.value.message.startswith(str(home))
    assert why in caught.value.message
    assert (caught.value.exit_code, bool(caught.value.hint)) == (1, True)
    assert not any((home / "jobs").glob("*"))


def test_sticky_world_writable_home_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o1777)
    monkeypatch.setenv("CLUSTERJOB_HOME", str(tmp_path))
    secure_home()
    assert {
        path.name: oct(mode & 0o777) for path in tmp_path.iterdir() if (mode := path.stat().st_mode)
    } == {"jobs": "0o700", "records": "0o700"}


def test_world_writable_directories_of_older_version_become_mode_755(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CLUSTERJOB_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for state_dir in (home(), home() / "jobs", home() / "records"):
        state_dir.mkdir()
        state_dir.chmod(0o777)
    secure_home()
    assert [
        oct(state_dir.stat().st_mode & 0o777)
        for state_dir in (home(), home() / "jobs", home() / "records")
    ] == ["0o755"] * 3


def test_directory_writable_by_group_of_user_alone_is_accepted(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    assert private_dirs.other_writers(tmp_path) == ""
    os.chown(tmp_path, 0, 12345)
    assert private_dirs.other_writers(tmp_path) == "its group can write to it (mode 0770)"


def test_link_of_another_user_to_own_file_is_that_users(tmp_path: Path) -> None:
    (tmp_path / "own").touch()
    (tmp_path / "link").symlink_to("own")
    assert private_dirs.other_writers(tmp_path / "link") == ""
    os.chown(tmp_path / "link", NOBODY, NOBODY, follow_symlinks=False)
    assert private_dirs.other_writers(tmp_path / "link") == "it belongs to uid 65534"
