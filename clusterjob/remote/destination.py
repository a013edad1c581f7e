"""The directory that fetched results are written to.

Nothing is written outside of this directory, into a version control directory or into a git
repository. No link leads outside: its target may begin with ``..`` parts, and each later part is a
directory or a link that stays inside.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from clusterjob.errors import HostError
from clusterjob.node.system import files, private_dirs

_VERSION_CONTROL = frozenset({".bzr", ".git", ".hg", ".jj", ".svn"})
# Git obeys the configuration of any directory that holds HEAD and objects: setup.c,
# is_git_directory.
_HEAD = "HEAD"
_HINT = "this host is not to be trusted"


@dataclass(frozen=True)
class File:
    """A file on a host: path, permission bits, size in bytes, modification time in ns."""

    path: str
    mode: int
    size: int
    mtime: int


def is_version_control(path: str) -> bool:
    """Return whether a part of a path is a version control directory, whose hooks may run."""
    return any(part.casefold() in _VERSION_CONTROL for part in path.split("/"))


def is_head(path: str) -> bool:
    """Return whether a file is named HEAD, which may make its directory a git repository."""
    return posixpath.basename(path).casefold() == _HEAD.casefold()


def is_plain(path: str) -> bool:
    """Return whether a host's path is relative, normalized and a valid file name here."""
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
    """A local directory that receives one host's results.

    Args:
        label: the host, for errors.
        target: the directory, which is created.
        notes: JSON file with the digest of each file that earlier fetches wrote, by path.

    Raises:
        OSError: the directory cannot be created.
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
        """Return the local path for a host's path.

        Raises:
            HostError: the path leads outside, or into a version control directory or repository.
        """
        outside = HostError(
            self._label,
            f"it names a file outside of the requested paths: {path[:80]!r}",
            hint=_HINT,
        )
        if not is_plain(path):
            raise outside
        place = self._root / path
        try:
            above = place.parent.resolve()
        except RuntimeError as error:  # a loop of links
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
                f"it names a file in a version control directory: {path[:80]!r}",
                hint=_HINT,
            )
        return place

    def repository_of(self, folder: str) -> str:
        """Return the git repository that holds a host's directory; empty if there is none."""
        try:
            found = self._repository_with((self._root / folder).resolve())
        except RuntimeError:  # a loop of links; writing a file there is refused later
            return ""
        return "" if found is None else os.path.relpath(found, self._root)

    def _repository_with(self, folder: Path) -> Path | None:
        """Return the git repository inside the target that contains `folder`, or None."""
        while folder.is_relative_to(self._root):
            if folder not in self._repositories:
                head = folder / _HEAD
                self._repositories[folder] = head.is_symlink() or head.is_file()
            if self._repositories[folder]:
                return folder
            folder = folder.parent
        return None

    def was_fetched(self, path: str, digest: str) -> bool:
        """Return whether a local file is unchanged since the last fetch."""
        return self._noted.get(path) == digest

    def note(self, path: str, digest: str) -> None:
        """Record that a local file has the host's content."""
        self._new[path] = digest

    def save_notes(self) -> None:
        """Save the recorded digests.

        Errors are ignored: without the digests the next fetch asks before it replaces a file.
        """
        if self._new:
            with contextlib.suppress(OSError):
                private_dirs.make(self._notes.parent)
                files.write_json(self._notes, {**self._noted, **self._new})

    def directory(self, path: str) -> None:
        """Create a directory.

        Raises:
            OSError: it cannot be created.
        """
        self.place(path).mkdir(parents=True, exist_ok=True)

    def begin(self, file: File) -> tuple[int, Path]:
        """Return (descriptor, path) of a temporary file in the directory of a file."""
        place = self.place(file.path)
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".clusterjob-", dir=place.parent)
        return handle, Path(name)

    def finish(self, file: File, part: Path, digest: str) -> None:
        """Rename a temporary file to its final path.

        A modification time later than this machine's clock becomes the current time.

        Raises:
            OSError: it cannot be renamed; the temporary file is removed.
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
        """Create a link, or keep an identical one.

        Returns:
            Why the link is refused; empty if it is accepted.

        Raises:
            OSError: it cannot be created.
        """
        place = self.place(path)
        if why := self._objection(place, link):
            return why
        if place.is_symlink() and os.readlink(place) == link:
            return ""
        if os.path.lexists(place):
            return "another file of that name exists here"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(link)
        self._made.append(place)
        return ""

    def remove_links(self) -> None:
        """Remove the links that this fetch created; the user's own links stay."""
        for place in reversed(self._made):
            with contextlib.suppress(OSError):
                place.unlink()

    def check_link(self, path: str) -> str:
        """Check a link again after all links are created; remove it if it points outside.

        Returns:
            Why it was removed; empty if it stays.
        """
        place = self.place(path)
        try:
            why = self._objection(place, os.readlink(place)) if place.is_symlink() else ""
            if not why and not place.resolve().is_relative_to(self._root):
                why = f"a link to {os.readlink(place)}, which is outside"
        except (RuntimeError, OSError):  # a loop of symbolic links
            why = "a link that points to itself"
        if why:
            place.unlink(missing_ok=True)
        return why

    def _objection(self, place: Path, link: str) -> str:
        names = link.split("/")
        while names and names[0] in ("..", "."):
            names.pop(0)
        try:
            target = Path(os.path.normpath(place.parent.resolve() / link))
            valid = b"\0" not in os.fsencode(link)
        except (ValueError, RuntimeError):
            valid = False
        if not valid:
            return "a link that cannot be created here"
        if (
            not link
            or os.path.isabs(link)
            or ".." in names
            or not target.is_relative_to(self._root)
        ):
            return f"a link to {link}, which is outside"
        if is_version_control(link):
            return f"a link to {link}, in a version control directory"
        return ""


def _umask() -> int:
    """Return the umask of this process without setting it, which would affect other threads."""
    found = re.search(r"^Umask:\s*([0-7]+)", files.read_text("/proc/self/status"), re.MULTILINE)
    if found:
        return int(found[1], 8)
    shown = subprocess.run(["sh", "-c", "umask"], capture_output=True, text=True, check=False)
    return int(shown.stdout, 8) if re.fullmatch(r"[0-7]{1,4}\s*", shown.stdout) else 0o077
