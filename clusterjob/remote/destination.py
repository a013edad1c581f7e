"""The directory that results are written to: nothing lands outside of it, nor in a directory of
version control.

A link keeps inside for ever: ``..`` stands only at its beginning, and what follows are directories,
or links that keep inside.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from clusterjob.errors import HostError
from clusterjob.node.system import files, private_dirs

_VERSION_CONTROL = frozenset({".bzr", ".git", ".hg", ".jj", ".svn"})
# Git obeys the configuration of any directory with such a file and objects: setup.c,
# is_git_directory.
_HEAD = "HEAD"
_HINT = "this host is not to be trusted"


@dataclass(frozen=True)
class File:
    """A file as a host describes it: path, permission bits, bytes, modification time in ns."""

    path: str
    mode: int
    size: int
    mtime: int


def is_version_control(path: str) -> bool:
    """Return whether a part of a path is a directory of version control: what lies there may run as
    a hook.
    """
    return any(part.casefold() in _VERSION_CONTROL for part in path.split("/"))


def is_head(path: str) -> bool:
    """Return whether a file of this path may make its directory a repository of git."""
    return posixpath.basename(path).casefold() == _HEAD.casefold()


def is_plain(path: str) -> bool:
    """Return whether a host's path is relative, in its shortest form, and can be a file's name
    here.
    """
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    plain = path == posixpath.normpath(path) and not path.startswith(("/", ".."))
    return (
        plain
        and path != "."
        and "\0" not in path
        and all(len(os.fsencode(part)) <= 255 for part in path.split("/"))
    )


class Destination:
    """A directory here.

    Args:
        label: the host, for errors.
        target: the directory, which is made.
        notes: the file that says what was fetched into it before: by path, the digest of each file.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, label: str, target: Path, notes: Path) -> None:
        self._label = label
        target.mkdir(parents=True, exist_ok=True)
        self._root = target.resolve()
        self._notes = notes
        self._new: dict[str, str] = {}
        self._made: list[Path] = []
        self._repositories: dict[Path, bool] = {}
        noted = files.read_json(notes)
        self._noted = noted if isinstance(noted, dict) else {}
        self._mask = _umask()

    def place(self, path: str) -> Path:
        """Return where a host's path is written.

        Raises:
            HostError: that would be outside, or in a directory of version control.
        """
        outside = HostError(
            self._label, f"it names a file outside of what was asked for: {path[:80]!r}", hint=_HINT
        )
        if not is_plain(path):
            raise outside
        place = self._root / path
        try:
            above = place.parent.resolve()
        except RuntimeError as error:  # a ring of links
            raise outside from error
        if not above.is_relative_to(self._root):
            raise outside
        if (
            is_version_control(os.path.relpath(above, self._root))
            or is_version_control(path)
            or self._repository_with(above)
        ):
            raise HostError(
                self._label,
                f"it names a file in a directory of version control: {path[:80]!r}",
                hint=_HINT,
            )
        return place

    def repository_of(self, folder: str) -> str:
        """Return the directory here that may be a repository of git: a host's directory or one
        above it; empty if there is none.
        """
        try:
            found = self._repository_with((self._root / folder).resolve())
        except RuntimeError:  # a ring of links, which `place` refuses
            return ""
        return "" if found is None else os.path.relpath(found, self._root)

    def _repository_with(self, folder: Path) -> Path | None:
        """Return the directory that may be a repository: this one, or one above it inside of the
        target.
        """
        while folder.is_relative_to(self._root):
            if folder not in self._repositories:
                head = folder / _HEAD
                self._repositories[folder] = head.is_symlink() or head.is_file()
            if self._repositories[folder]:
                return folder
            folder = folder.parent
        return None

    def was_fetched(self, path: str, digest: str) -> bool:
        """Return whether a file here is as it was fetched last: nobody has changed it."""
        return self._noted.get(path) == digest

    def note(self, path: str, digest: str) -> None:
        """Note that a file here is as the host had it."""
        self._new[path] = digest

    def save_notes(self) -> None:
        """Write down what was noted; a full disk costs the notes alone, and a question at the next
        fetch.
        """
        if not self._new:
            return
        try:
            private_dirs.make(self._notes.parent)
            files.write_json(self._notes, {**self._noted, **self._new})
        except OSError:
            pass

    def directory(self, path: str) -> None:
        """Make a directory.

        Raises:
            OSError: it cannot be made.
        """
        self.place(path).mkdir(parents=True, exist_ok=True)

    def begin(self, file: File) -> tuple[int, Path]:
        """Return (descriptor, path) of a temporary file beside the place of a file."""
        place = self.place(file.path)
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".clusterjob-", dir=place.parent)
        return handle, Path(name)

    def finish(self, file: File, part: Path, digest: str) -> None:
        """Put a temporary file into its place. The host's clock may not date it into the future.

        Raises:
            OSError: it cannot be put there; nothing is left of it.
        """
        try:
            part.chmod(file.mode & 0o777 & ~self._mask)
            mtime = min(file.mtime, time.time_ns())
            os.utime(part, ns=(mtime, mtime))
            os.replace(part, self.place(file.path))
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        self.note(file.path, digest)

    def link(self, path: str, link: str) -> str:
        """Make a link, or leave the same one; return why it is not taken, empty if it is.

        Raises:
            OSError: it cannot be made.
        """
        place = self.place(path)
        if why := self._objection(place, link):
            return why
        if place.is_symlink() and os.readlink(place) == link:
            return ""
        if os.path.lexists(place):
            return "there is something else of that name here"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(link)
        self._made.append(place)
        return ""

    def remove_links(self) -> None:
        """Remove the links that this fetch has made; a link of the user's stays."""
        for place in reversed(self._made):
            with contextlib.suppress(OSError):
                place.unlink()

    def check_link(self, path: str) -> str:
        """Look at a link again when all are made; remove it, and return why, if it leads elsewhere
        after all.
        """
        place = self.place(path)
        try:
            why = self._objection(place, os.readlink(place)) if place.is_symlink() else ""
            if not why and not place.resolve().is_relative_to(self._root):
                why = f"a link to {os.readlink(place)}, which is elsewhere"
        except (RuntimeError, OSError):  # a ring of links
            why = "a link that leads to itself"
        if why:
            place.unlink(missing_ok=True)
        return why

    def _objection(self, place: Path, link: str) -> str:
        names = link.split("/")
        while names and names[0] in ("..", "."):
            names.pop(0)
        try:
            leads = Path(os.path.normpath(place.parent.resolve() / link))
            os.fsencode(link)
        except (ValueError, RuntimeError):
            return "a link that cannot be made here"
        if not link or os.path.isabs(link) or ".." in names or not leads.is_relative_to(self._root):
            return f"a link to {link}, which is elsewhere"
        return (
            f"a link to {link}, in a directory of version control"
            if is_version_control(link)
            else ""
        )


def digest(path: Path) -> str:
    """Return the digest (SHA-256) of a file here."""
    found = hashlib.sha256()
    with path.open("rb") as stream:
        while data := stream.read(1 << 20):
            found.update(data)
    return found.hexdigest()


def _umask() -> int:
    """Return this process's umask without setting it, which would be felt by other threads."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022
