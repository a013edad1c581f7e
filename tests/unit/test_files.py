"""Atomic writes of files, and reads of JSON files."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterjob.node.system import files

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters()),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters()), inner, max_size=4)
    ),
    max_leaves=10,
)


def test_atomic_write_sets_content_and_mode_and_leaves_no_other_file(special_path: Path) -> None:
    path = special_path / "-file 'x'.json"
    files.write_atomic(path, b"content")
    assert path.read_bytes() == b"content"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    files.write_atomic(path, b"new", mode=0o644)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert os.listdir(special_path) == [path.name]


def test_failed_write_keeps_old_content_and_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    files.write_atomic(path, b"old")

    def raise_disk_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", raise_disk_full)
    with pytest.raises(OSError, match="No space"):
        files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_reserve_takes_space_on_a_file_system_without_fallocate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(descriptor: int, offset: int, size: int) -> None:  # glibc: posix_fallocate(3)
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        if flags & os.O_APPEND or flags & os.O_ACCMODE == os.O_WRONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        os.pwrite(descriptor, bytes(size), offset)

    monkeypatch.setattr(os, "posix_fallocate", write)
    files.reserve(tmp_path / "result.json")
    assert files.size_of(tmp_path / ".result.json.reserve") == files.RESERVED


@given(json_values)
def test_json_value_is_equal_after_round_trip(
    tmp_path_factory: pytest.TempPathFactory, value: object
) -> None:
    path = tmp_path_factory.getbasetemp() / "value.json"
    files.write_json(path, value)
    assert files.read_json(path) == value


def test_json_file_is_indented_and_not_escaped(tmp_path: Path) -> None:
    files.write_json(tmp_path / "file", {"näme": "☃"})
    assert (tmp_path / "file").read_text(encoding="utf-8") == '{\n "näme": "☃"\n}\n'


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"{'a': 1}", b"[1, 2", b"[" * 100_000])
def test_invalid_json_is_read_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    assert files.read_json(tmp_path / "file") is None


def test_missing_json_file_is_read_as_none(tmp_path: Path) -> None:
    assert files.read_json(tmp_path / "nowhere") is None
    (tmp_path / "file").touch()
    assert files.read_json(tmp_path / "file" / "below") is None


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("nowhere", path)])
def test_pipe_or_broken_link_is_no_tree_to_remove(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "job")
    with pytest.raises(NotADirectoryError):
        files.remove_tree(tmp_path / "job")
    assert os.path.lexists(tmp_path / "job")
