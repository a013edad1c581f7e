"""Make private directories, and check who else could write to a file or a directory."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from pathlib import Path


def make(path: Path) -> None:
    """Make a directory and its missing parents, each with mode 0700 under every umask.

    A directory that exists is not changed.

    Raises:
        OSError: a directory cannot be made.
    """
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for level in reversed(missing):
        try:
            os.mkdir(level, 0o700)
        except FileExistsError as error:
            if not level.is_dir():
                raise NotADirectoryError(
                    errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(level)
                ) from error


def other_writers(path: Path) -> str:
    """Return which other users could change a file or a directory; empty if none can.

    An example is "everyone can write to it (mode 0777)". A directory with the sticky bit counts as
    safe: only the owner of a file in it can rename or remove the file.

    Raises:
        OSError: the path does not exist.
    """
    return other_writers_of(path.stat()) or (
        other_writers_of(path.lstat()) if path.is_symlink() else ""
    )


def other_writers_of(status: os.stat_result) -> str:
    """Return which other users could change the file of a stat result; see `other_writers`."""
    owner, mode = status.st_uid, stat.S_IMODE(status.st_mode)
    if owner not in (os.geteuid(), 0):
        return f"it belongs to {_user_name(owner)} (uid {owner})"
    if stat.S_ISLNK(status.st_mode) or (stat.S_ISDIR(status.st_mode) and mode & stat.S_ISVTX):
        return ""
    if mode & 0o002:
        return f"everyone can write to it (mode {mode:04o})"
    if mode & 0o020 and not _is_own_group(status.st_gid):
        return f"its group can write to it (mode {mode:04o})"
    return ""


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return "another user"


def _is_own_group(gid: int) -> bool:
    """Return whether a group is the user's private group, with no other member."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return (
        group.gr_name == user.pw_name
        and group.gr_gid == user.pw_gid
        and set(group.gr_mem) <= {user.pw_name}
    )
