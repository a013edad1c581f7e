"""List the files of the working directory to send, with mode, size and hash of each."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import stat
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clusterjob.core.snapshot import ignore_files
from clusterjob.core.snapshot.git_revision import Git
from clusterjob.core.snapshot.ignore_files import OWN_IGNORE, Rules
from clusterjob.core.snapshot.secret_files import looks_secret
from clusterjob.core.units import show_size
from clusterjob.errors import SubmitError
from clusterjob.node.logs.job_dir import CODE_GIT, CODE_LIST
from clusterjob.node.system import files
from clusterjob.node.system.sanitize import sanitize

LIMIT = 512 * 1024**2  # bytes; prevents sending data to every host by mistake
MOST_ENTRIES = 100_000  # prevents sending a home directory by mistake
GIT = ".git"
_NEVER = frozenset({GIT, ".hg", ".svn"})
_COMPILED = "__pycache__"  # Python would replace the files in it through a link
_CHUNK = 1 << 18
_MAX_NAMED = 10  # maximum number of excluded secrets in a message


@dataclass(frozen=True)
class SnapshotEntry:
    """One file, directory or link in a snapshot.

    Attributes:
        path: path relative to the snapshot's root, with slashes.
        kind: ``file``, ``dir`` or ``link``.
        mode: permission bits.
        size: size of a file in bytes, else 0.
        value: a file's digest (SHA-256), or a link's target.
    """

    path: str
    kind: str
    mode: int
    size: int
    value: str


@dataclass(frozen=True)
class Snapshot:
    """The content of a directory at one moment.

    Attributes:
        root: the directory.
        entries: files, directories and links to send; a directory precedes its content.
        secrets: paths that were left out because they look like secrets.
        git: the directory with the files of the snapshot's own .git directory; None without one.
    """

    root: Path
    entries: tuple[SnapshotEntry, ...]
    secrets: tuple[str, ...] = ()
    git: Path | None = None

    @property
    def files(self) -> int:
        """Return the number of files."""
        return sum(entry.kind == "file" for entry in self.entries)

    @property
    def size(self) -> int:
        """Return the size of all files in bytes."""
        return sum(entry.size for entry in self.entries)

    def left_out(self, most: int = _MAX_NAMED) -> str:
        """Return a line that names at most `most` of the excluded secrets; empty if none."""
        shown = ", ".join(sanitize(path) for path in self.secrets[:most])
        more = f" and {len(self.secrets) - most} more" if len(self.secrets) > most else ""
        return (
            f"not sent, as it looks like a secret: {shown}{more} (--include-secrets sends it)"
            if shown
            else ""
        )

    def text(self) -> str:
        """Return the list of files as text: size and path of each, and the excluded secrets."""
        rows = [f"{entry.size:>12} {entry.path}" for entry in self.entries if entry.kind == "file"]
        return "\n".join([*rows, *([self.left_out(len(self.secrets))] if self.secrets else [])])

    def to_json(self) -> dict[str, Any]:
        """Return the list of files as plain data."""
        return {
            "directory": str(self.root),
            "files": [
                {"path": entry.path, "bytes": entry.size}
                for entry in self.entries
                if entry.kind == "file"
            ],
            "bytes": self.size,
            "left_out": list(self.secrets),
        }

    @property
    def digest(self) -> str:
        """Return a hash of the snapshot's entries."""
        return hashlib.sha256(
            json.dumps([vars(entry) for entry in self.entries]).encode()
        ).hexdigest()

    def keep(self, folder: Path) -> None:
        """Write the list of entries into a job's directory; `sent_digests` reads it."""
        files.write_atomic(folder / CODE_LIST, self.packed())

    def packed(self) -> bytes:
        """Return the list of entries as compressed JSON, as it is sent and stored."""
        rows = [
            (entry.path, entry.kind, entry.mode, entry.size, entry.value) for entry in self.entries
        ]
        return zlib.compress(json.dumps(rows).encode(), 1)

    def path(self, entry: SnapshotEntry) -> Path:
        """Return the path of a file on this machine."""
        if self.git is not None and entry.path.startswith(f"{GIT}/"):
            return self.git / entry.path.removeprefix(f"{GIT}/")
        return self.root / entry.path

    def of_digests(self, wanted: set[str]) -> list[SnapshotEntry]:
        """Return one file of the snapshot for each digest."""
        files = (entry for entry in self.entries if entry.kind == "file")
        return list({entry.value: entry for entry in files if entry.value in wanted}.values())

    def content(self, entries: list[SnapshotEntry]) -> Iterator[bytes]:
        """Yield the bytes of files, one file after the other, in pieces.

        Raises:
            SubmitError: a file cannot be read any more, or is shorter than before.
        """
        for entry in entries:
            left = entry.size
            try:
                with self.path(entry).open("rb") as stream:
                    while left and (data := stream.read(min(left, _CHUNK))):
                        left -= len(data)
                        yield data
            except OSError as error:
                raise SubmitError(
                    f"{entry.path!r} cannot be read any more: {error.strerror}"
                ) from error
            if left:
                raise changed(entry)


def sent_digests(folder: Path) -> dict[str, str]:
    """Return the digests of a job's sent files by path; empty if they are unknown."""
    found = sent(folder, folder)
    entries = () if found is None else found.entries
    return {entry.path: entry.value for entry in entries if entry.kind == "file"}


def sent(folder: Path, root: Path) -> Snapshot | None:
    """Return the snapshot that a job has sent; None if its list of files is missing or damaged.

    Args:
        folder: the job's directory.
        root: the directory whose files are sent if a host does not have them any more.
    """
    try:
        rows = json.loads(zlib.decompress((folder / CODE_LIST).read_bytes()))
        entries = [SnapshotEntry(*row) for row in rows]
    except (OSError, ValueError, TypeError, zlib.error):
        return None
    return Snapshot(root, tuple(entries), git=folder / CODE_GIT)


def changed(entry: SnapshotEntry) -> SubmitError:
    """Return the error for a file that changes while it is sent."""
    return SubmitError(
        f"{entry.path!r} changed while it was being sent",
        f"submit again, or leave it out in {OWN_IGNORE}",
    )


def take(
    root: Path,
    limit: int = LIMIT,
    include_secrets: bool = False,  # noqa: FBT001, FBT002
    git: Git | None = None,
) -> Snapshot:
    """Return a snapshot of a directory, without ignored files and without secrets.

    Files that .gitignore or .clusterjobignore exclude are ignored.

    Args:
        root: the directory.
        limit: largest total size of its files in bytes.
        include_secrets: whether to include files that look like secrets.
        git: asks git about the directory; None for a new one.

    Raises:
        SubmitError: the files exceed the limit, or a file or directory cannot be read.
    """
    found = listed(root, include_secrets=include_secrets, git=git)
    if found.size > limit:
        raise too_large(root, found.entries, limit=limit)
    if found.secrets:
        logging.getLogger("clusterjob").warning("clusterjob: %s", found.left_out())
    try:
        entries = tuple(
            _hashed(root, entry) if entry.kind == "file" else entry for entry in found.entries
        )
    except OSError as error:
        raise unreadable(error) from error
    return replace(found, entries=entries)


def listed(
    root: Path,
    *,
    include_secrets: bool = False,
    linked: Linked | None = None,
    git: Git | None = None,
) -> Snapshot:
    """Return a snapshot like `take`, without digests and without a limit of the total size.

    Args:
        root: the directory.
        include_secrets: whether to include files that look like secrets.
        linked: how files that are left out become links to the current ones; None for no links.
        git: asks git about the directory; None for a new one.

    Raises:
        SubmitError: the directory holds too many files, or a directory cannot be read.
    """
    secrets: list[str] | None = None if include_secrets else []
    try:
        rules = ignore_files.above(git or Git(root))
        found = _walk(root, "", rules=rules, secrets=secrets, linked=linked)
        entries = tuple(itertools.islice(found, MOST_ENTRIES + 1))
    except OSError as error:
        raise unreadable(error) from error
    if len(entries) > MOST_ENTRIES:
        raise SubmitError(
            f"{root} holds more than {MOST_ENTRIES:,} files",
            f"leave data out in {OWN_IGNORE}, or name another --workdir",
        )
    return Snapshot(root, entries, secrets=tuple(secrets or ()))


def unreadable(error: OSError) -> SubmitError:
    """Return the error for a file or directory of the snapshot that cannot be read."""
    return SubmitError(
        f"{error.filename} cannot be read: {error.strerror}", f"leave it out in {OWN_IGNORE}"
    )


@dataclass(frozen=True)
class Linked:
    """Links to the current files take the place of files that a snapshot leaves out.

    Attributes:
        code: path of the directory with the job's code, relative to the root; empty for the root.
        only: whether only this directory is copied.
        largest: maximum bytes of a file to copy; a larger file is data, not code.
    """

    code: str = ""
    only: bool = False
    largest: int = 32 << 20

    def leads_to_code(self, path: str) -> bool:
        """Return whether a path is the directory with the code, or is above it."""
        return f"{self.code}/".startswith(f"{path}/")

    def leaves_out(self, path: str, size: int) -> bool:
        """Return whether a link takes the place of a path that no pattern excludes."""
        return size > self.largest or (
            self.only
            and not f"{path}/".startswith(f"{self.code}/")
            and not self.leads_to_code(path)
        )


def _walk(
    root: Path,
    below: str,
    rules: list[Rules],
    secrets: list[str] | None,
    linked: Linked | None = None,
) -> Iterator[SnapshotEntry]:
    directory = root / below
    rules = [*rules, *ignore_files.of_directory(directory, below)]
    for item in sorted(os.scandir(directory), key=lambda item: item.name):
        path = below + item.name
        status = item.stat(follow_symlinks=False)
        is_directory = stat.S_ISDIR(status.st_mode)
        if item.name in _NEVER or (linked and item.name == _COMPILED):
            continue
        is_regular = stat.S_ISREG(status.st_mode)
        left_out = ignore_files.excludes(rules, path, is_directory=is_directory)
        rules_below = rules
        if linked and is_directory and linked.leads_to_code(path):
            # The code is in a directory that the repository ignores: its patterns do not apply.
            rules_below = [] if left_out else rules
            left_out = False
        elif (
            not left_out
            and secrets is not None
            and (is_directory or is_regular)
            and looks_secret(root, path, is_directory=is_directory)
        ):
            left_out = True
            secrets.append(path + "/" * is_directory)
        mode = stat.S_IMODE(status.st_mode) & 0o777
        if left_out or (linked and linked.leaves_out(path, status.st_size * is_regular)):
            if linked:
                yield SnapshotEntry(path, "link", mode=0, size=0, value=str(root / path))
        elif is_directory:
            yield SnapshotEntry(path, "dir", mode=mode, size=0, value="")
            yield from _walk(root, f"{path}/", rules=rules_below, secrets=secrets, linked=linked)
        elif stat.S_ISLNK(status.st_mode):
            yield SnapshotEntry(path, "link", mode=0, size=0, value=os.readlink(item.path))
        elif is_regular:
            yield SnapshotEntry(path, "file", mode=mode, size=status.st_size, value="")


def _hashed(root: Path, entry: SnapshotEntry) -> SnapshotEntry:
    found, size = hashlib.sha256(), 0
    with (root / entry.path).open("rb") as stream:
        while data := stream.read(_CHUNK):
            found.update(data)
            size += len(data)
    return replace(entry, size=size, value=found.hexdigest())


def too_large(root: Path, entries: Iterable[SnapshotEntry], limit: int) -> SubmitError:
    """Return the error for a directory that is larger than the limit, with its largest entries."""
    sizes: Counter[str] = Counter()
    for entry in entries:
        sizes[entry.path.partition("/")[0]] += entry.size
    what = ", ".join(f"{name} ({show_size(size)})" for name, size in sizes.most_common(3))
    return SubmitError(
        f"{root} holds {show_size(sizes.total())}, "
        f"more than the limit of {show_size(limit)}: {what}",
        f"leave data out in {OWN_IGNORE}, or raise the limit: --set sync_limit=2G",
    )
