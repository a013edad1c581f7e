"""Make private directories, and check who else could write to a file or a directory."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from clusterjob.node.system import files


def make(path: Path) -> None:
    """Make a directory and its missing parents, each with mode 0700.

    A directory that exists is not changed.

    Raises:
        OSError: a directory cannot be made, or a file is in its place.
    """
    if not path.is_dir():
        make(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def other_writers(path: Path, *, sticky: bool = True) -> str:
    """Return which other users could change a file or a directory; empty if none can.

    An example is "everyone can write to it (mode 0777)". A directory with the sticky bit counts as
    safe, unless `sticky` is false: only the owner of a file in it can rename or remove the file.

    Raises:
        OSError: the path does not exist.
    """
    return _writers(path.stat(), sticky=sticky) or _writers(path.lstat(), sticky=sticky)


def _writers(status: os.stat_result, *, sticky: bool) -> str:
    owner, mode = status.st_uid, stat.S_IMODE(status.st_mode)
    if owner not in (os.geteuid(), 0):
        return f"it belongs to uid {owner}"
    is_sticky = sticky and stat.S_ISDIR(status.st_mode) and mode & stat.S_ISVTX
    if stat.S_ISLNK(status.st_mode) or is_sticky:
        return ""
    if mode & 0o002:
        return f"everyone can write to it (mode {mode:04o})"
    if mode & 0o020 and not _is_own_group(status.st_gid):
        return f"its group can write to it (mode {mode:04o})"
    return ""


def exposed(place: Path, *inside: str) -> str:
    """Return why other users could change a directory or put another one in its place.

    Empty if they cannot, or if the directory does not exist.

    Args:
        place: the directory.
        inside: names of files or directories in it that are checked too: in a sticky directory,
            such as /tmp, another user could have made them.

    Raises:
        OSError: the directory cannot be examined.
    """
    for path in (place, *(place / name for name in inside)):
        if path.exists() and (why := other_writers(path)):
            return f"{path} is not safe for jobs: {why}"
    for folder in place.resolve().parents if place.exists() else ():
        status = folder.stat()
        is_open = status.st_mode & 0o002 and not status.st_mode & stat.S_ISVTX
        if is_open or (status.st_uid not in (os.geteuid(), 0) and _is_mapped(status.st_uid)):
            who = "everyone can write to" if is_open else f"uid {status.st_uid} owns"
            return (
                f"{place} is not safe for jobs: {who} {folder}, and could put another directory in"
                " its place"
            )
    return ""


def _is_mapped(uid: int) -> bool:
    """Return whether a user exists in this user namespace.

    In a container, the host's directories belong to a user that does not, such as the host's root.
    """
    rows = [line.split() for line in files.read_text("/proc/self/uid_map").splitlines()]
    inside = (int(first) <= uid < int(first) + int(count) for first, _, count in rows)
    return any(inside) or not rows  # there are none outside of Linux


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
