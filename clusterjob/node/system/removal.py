"""Measure and remove directory trees without following links."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_ASIDE = ".removed-"
_ABANDONED = 3600.0  # seconds after which the process that removes a tree must be dead


def tree_size(path: Path) -> int:
    """Return the bytes on disk of a directory tree; 0 if it does not exist.

    Links are not followed, and a file with several names in the tree counts once.
    """
    total, seen = 0, set()
    for _, entries in _walk(path):
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
                if (status.st_dev, status.st_ino) in seen:
                    continue
                seen.add((status.st_dev, status.st_ino))
            total += status.st_blocks * 512
    return total


def _walk(path: Path) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    """Yield each directory of a tree with its entries; pass over other file systems."""
    try:
        device = os.lstat(path).st_dev
    except OSError:
        return
    folders = [str(path)]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as found:
                entries = list(found)
            yield folder, entries
            folders += [
                entry.path
                for entry in entries
                if entry.is_dir(follow_symlinks=False)
                and entry.stat(follow_symlinks=False).st_dev == device
            ]
        except OSError:
            continue  # it cannot be read, or it was removed meanwhile


def _mounted(path: Path) -> str:
    """Return a directory in a tree at which another file system is mounted; empty if none is."""
    device = os.lstat(path).st_dev
    for _, entries in _walk(path):
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError as error:
                if isinstance(error, FileNotFoundError):
                    continue
                return entry.path  # such as a mount whose server is gone
            if stat.S_ISDIR(status.st_mode) and status.st_dev != device:
                return entry.path
    return ""


def is_directory(path: Path) -> bool:
    """Return whether a path is a directory itself, not a link to one; False if it is absent.

    Raises:
        OSError: the path cannot be examined.
    """
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def remove_tree(path: Path) -> None:
    """Remove a directory tree; a reader sees the whole tree or nothing.

    The directory gets a hidden name first. If another process has removed it, nothing happens.

    Raises:
        OSError: it is no directory, cannot be renamed or removed, or another file system is
            mounted in it.
    """
    if not is_directory(path):
        if os.path.lexists(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        return
    try:
        mounted = _mounted(path)
    except FileNotFoundError:
        return
    if mounted:
        raise OSError(errno.EBUSY, "another file system is mounted there", mounted)
    aside = path.with_name(f"{_ASIDE}{secrets.token_hex(8)}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    os.utime(aside)
    _remove(aside)


def remove_abandoned(folder: Path) -> None:
    """Remove the trees of `remove_tree` calls that were killed; errors are ignored."""
    try:
        found = [path for path in folder.iterdir() if path.name.startswith(_ASIDE)]
    except OSError:
        return
    for path in found:
        try:
            if is_directory(path) and time.time() - path.lstat().st_mtime > _ABANDONED:
                _remove(path)
        except OSError:
            pass  # another process removes it, or it stays for the next call


def _remove(path: Path) -> None:
    """Remove a tree, also directories that their owner cannot write."""

    def retry(function: Callable[..., Any], name: str, error: Any) -> None:
        folder = name if function is os.scandir or function is os.open else os.path.dirname(name)
        if isinstance(error[1], FileNotFoundError):
            return
        if not isinstance(error[1], PermissionError) or not is_directory(Path(folder)):
            raise error[1]
        os.chmod(folder, 0o700)
        if folder == name:
            shutil.rmtree(name)
        else:
            function(name)

    shutil.rmtree(path, onerror=retry)
