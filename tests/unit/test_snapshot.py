"""Snapshot of the working directory, compared with git, and the file store of hosts."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import write_tree

from clusterjob.core import snapshot
from clusterjob.core.snapshot import git_revision
from clusterjob.core.snapshot.git_revision import Git
from clusterjob.errors import SubmitError
from clusterjob.node.host_server import code_store


def paths(root: Path) -> list[str]:
    return [entry.path for entry in snapshot.take(root).entries if entry.kind != "dir"]


def git(root: Path, *words: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "core.excludesFile=/dev/null"]
    return subprocess.run(
        ["git", "-C", root, *identity, *words], capture_output=True, text=True, check=True
    ).stdout


def test_snapshot_has_files_links_and_directories(tmp_path: Path) -> None:
    names = {"a.py": "a", "b/c.py": "c", "name with\nnewline": "x", "déjà": "y", "-dash": "z"}
    write_tree(tmp_path, **names, **{"run.sh": "#!/bin/sh\n"})
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("b/c.py")
    (tmp_path / "run.sh").chmod(0o755)
    os.mkfifo(tmp_path / "pipe")
    taken = snapshot.take(tmp_path)
    found = {entry.path: entry for entry in taken.entries}
    assert set(found) == {*names, "b", "empty", "link", "run.sh"}
    assert found["run.sh"].mode & 0o111
    assert (found["link"].kind, found["link"].value) == ("link", "b/c.py")
    assert found["a.py"].value == hashlib.sha256(b"a").hexdigest()
    assert (taken.files, taken.size) == (6, 5 + 10)
    assert list(found).index("b") < list(found).index("b/c.py")


def test_ignored_files_and_git_directories_are_left_out(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        **{
            ".gitignore": "*.log\n/data/\n!keep.log\n",
            ".clusterjobignore": "!wanted.log\nsecret\n",
            "x.log": "",
            "keep.log": "",
            "wanted.log": "",
            "secret": "",
            "data/big": "",
            "sub/data/small": "",
            "sub/.gitignore": "local\n",
            "sub/local": "",
            "local": "",
            ".git/config": "",
            "sub/.git": "",
        },
    )
    assert paths(tmp_path) == [
        ".clusterjobignore",
        ".gitignore",
        "keep.log",
        "local",
        "sub/.gitignore",
        "sub/data/small",
        "wanted.log",
    ]


def test_subdirectory_of_repository_follows_ignore_rules_above_it(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    write_tree(
        tmp_path,
        **{
            ".gitignore": "*.pt\n/project/out/\n",
            ".git/info/exclude": "mine\n",
            "project/a.py": "",
            "project/w.pt": "",
            "project/out/x": "",
            "project/mine": "",
        },
    )
    assert paths(tmp_path / "project") == ["a.py"]


def test_too_large_directory_is_refused_with_largest_entries(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        **{"train.py": "x", "data/a": "x" * 3000, "data/b": "x" * 3000, "model.pt": "x" * 2000},
    )
    with pytest.raises(
        SubmitError,
        match=r"holds 8\.0 KB, more than the limit of 5\.0 KB: data \(6\.0 KB\), model\.pt",
    ) as caught:
        snapshot.take(tmp_path, 5000)
    assert ".clusterjobignore" in caught.value.hint


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MOST_ENTRIES", 5)
    write_tree(tmp_path, **{f"file{number}": "" for number in range(5)})
    assert snapshot.take(tmp_path).files == 5
    write_tree(tmp_path, more="")
    with pytest.raises(SubmitError, match="holds more than 5 files"):
        snapshot.take(tmp_path)


def test_digest_depends_on_content_and_not_on_time(tmp_path: Path) -> None:
    write_tree(tmp_path, a="1", b="2")
    first = snapshot.take(tmp_path).digest
    os.utime(tmp_path / "a", (0, 0))
    assert snapshot.take(tmp_path).digest == first
    write_tree(tmp_path, b="3")
    assert snapshot.take(tmp_path).digest != first


def state_of(root: Path) -> tuple[dict[str, Any], str]:
    state, diff = Git(root).state()
    assert state is not None
    return state, diff.decode()


def test_recorded_changes_leave_out_secrets_and_end_at_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(tmp_path, "init", "-q")
    names = ("a.py", ".env", "old.env", "sub/id_rsa", "we ird\n.env")
    write_tree(tmp_path, **dict.fromkeys(names, "KEY=old\n"))
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "first")
    write_tree(tmp_path, **dict.fromkeys(names, "KEY=new PRIVATE KEY\n"))
    (tmp_path / "old.env").unlink()
    git(tmp_path, "mv", "-f", ".env", "renamed.txt")
    for root in (tmp_path, tmp_path / "sub"):
        state, shown = state_of(root)
        assert (root == tmp_path) == ("a/a.py" in shown)
        assert [name for name in names[1:] if name in shown] == []
        assert state["complete"] is False
    state, _ = state_of(tmp_path)
    assert {"a.py", ".env", "renamed.txt", "sub/id_rsa"} <= set(state["changed"])
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "second")
    (tmp_path / "a.py").write_text("x\n")
    state, shown = state_of(tmp_path)
    assert (state["complete"], "+x" in shown) == (True, True)
    monkeypatch.setattr(git_revision, "_MAX_DIFF", 20)
    state, shown = state_of(tmp_path)
    assert (state["complete"], len(shown)) == (False, 20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Path.unlink, "'a' cannot be read any more"),
        (lambda path: path.write_text("2"), "'a' changed while it was being sent"),
    ],
)
def test_file_removed_or_changed_after_snapshot_is_error(
    tmp_path: Path, change: Callable[[Path], Any], message: str
) -> None:
    write_tree(tmp_path, a="11")
    taken = snapshot.take(tmp_path)
    change(tmp_path / "a")
    with pytest.raises(SubmitError, match=message):
        list(taken.content(taken.entries))


# -- store of a host -------------------------------------------------------------------------------


class Store:
    """Store of a host, used as the submitter uses it."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def install(self, taken: snapshot.Snapshot, job: str) -> list[str]:
        (self.home / "jobs" / job).mkdir(parents=True, exist_ok=True)
        read = io.BytesIO(taken.packed()).read
        return code_store.install(self.home, job, read)["missing"]

    def send(self, taken: snapshot.Snapshot, missing: list[str]) -> list[str]:
        entries = taken.of_digests(set(missing))
        data = b"".join(taken.content(entries))
        listed = [(entry.value, entry.size) for entry in entries]
        return code_store.receive(self.home, listed, io.BytesIO(data).read)["wrong"]

    def code(self, job: str) -> Path:
        return self.home / "jobs" / job / "code"


@pytest.fixture
def host(tmp_path: Path) -> Store:
    return Store(tmp_path / "host")


@pytest.fixture
def taken(host: Store, project: Path) -> snapshot.Snapshot:
    """Return the snapshot of the project, which the host has installed for a job."""
    taken = snapshot.take(project)
    host.send(taken, host.install(taken, "one"))
    host.install(taken, "one")
    return taken


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    write_tree(
        root, **{"train.py": "print()", "pkg/a.py": "a", "pkg/b.py": "a", "run.sh": "#!/bin/sh\n"}
    )
    (root / "run.sh").chmod(0o755)
    (root / "link").symlink_to("pkg/a.py")
    (root / "empty").mkdir()
    return root


def test_installed_copy_equals_snapshot(host: Store, project: Path) -> None:
    taken = snapshot.take(project)
    missing = host.install(taken, "one")
    assert len(missing) == 3, "two of the four files have the same content"
    assert not host.code("one").exists()
    assert host.send(taken, missing) == []
    assert host.install(taken, "one") == []
    copied = snapshot.take(host.code("one"))
    assert copied.entries == taken.entries
    assert not [path for path in host.code("one").parent.iterdir() if path.name.startswith(".")]


def test_next_job_is_sent_only_changed_files(
    host: Store, project: Path, taken: snapshot.Snapshot
) -> None:
    assert host.install(taken, "two") == []
    write_tree(project, **{"train.py": "print(2)"})
    changed = snapshot.take(project)
    assert host.install(changed, "three") == [hashlib.sha256(b"print(2)").hexdigest()]


@pytest.mark.parametrize(
    "damage",
    [lambda blob: blob.write_bytes(b""), Path.unlink],
)
def test_damaged_file_of_store_is_requested_again(
    host: Store, taken: snapshot.Snapshot, damage: Callable[[Path], Any]
) -> None:
    digest = hashlib.sha256(b"print()").hexdigest()
    damage(host.home / "store" / digest[:2] / digest)
    assert host.install(taken, "two") == [digest]
    assert not host.code("two").exists()
    host.send(taken, [digest])
    assert host.install(taken, "two") == []
    assert (host.code("two") / "train.py").read_text() == "print()"


def test_received_file_with_wrong_digest_is_not_stored(host: Store, project: Path) -> None:
    taken = snapshot.take(project)
    missing = host.install(taken, "one")
    (project / "train.py").write_text("PRINT()")  # of the same size
    digest = hashlib.sha256(b"print()").hexdigest()
    assert host.send(taken, missing) == [digest]
    assert host.install(taken, "one") == [digest]


def test_failed_installation_leaves_no_files(host: Store, taken: snapshot.Snapshot) -> None:
    broken = json.loads(zlib.decompress(taken.packed()))
    broken.append(["no/such/folder/file", "file", 0o644, 1, hashlib.sha256(b"a").hexdigest()])
    host.code("two").parent.mkdir()
    packed = io.BytesIO(zlib.compress(json.dumps(broken).encode()))
    with pytest.raises(FileNotFoundError):
        code_store.install(host.home, "two", packed.read)
    assert list(host.code("two").parent.iterdir()) == []
