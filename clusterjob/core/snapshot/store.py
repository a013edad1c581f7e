"""Keep the code of submitted jobs: one read-only directory for each content.

    snapshots/<name>/<directory's name>/...   a snapshot; its name is a digest of its content
    snapshots/files/<xx>/<digest>-<mode>      its files; equal files of all snapshots are hard links
    snapshots/stat/<digest of path>           digests of a directory's files by their status

A job's directory has a link ``code`` to its snapshot. A snapshot without a job is unused.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from clusterjob.core.snapshot import Snapshot, SnapshotEntry
from clusterjob.core.snapshot.file_pool import FilePool, is_intact
from clusterjob.core.snapshot.git_revision import Git
from clusterjob.core.snapshot.source import NO_SNAPSHOT, CodeSource, listed
from clusterjob.core.snapshot.stat_cache import StatCache
from clusterjob.errors import SubmitError
from clusterjob.node.logs.job_dir import CODE
from clusterjob.node.system import files, private_dirs

_DIRECTORY = "snapshots"
_NAME = re.compile(r"[0-9a-f]{20}")
_PART = ".new-"  # begin of the name of an incomplete snapshot
_TRIES = 3  # maximum number of times to read a directory whose files change meanwhile
# Seconds after its last submission for which a snapshot counts as used: the submission may not have
# written the job's link yet.
FRESH = 3600.0


class SnapshotStore:
    """The snapshots of one user.

    Args:
        home: clusterjob's directory, in which ``jobs`` and ``snapshots`` are.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self.directory = home / _DIRECTORY
        self._files = FilePool(self.directory / "files")

    # -- submitting --------------------------------------------------------------------------------

    def take(self, source: CodeSource, git: Git | None = None) -> tuple[str, Snapshot]:
        """Copy the code of a job into the store; return the snapshot's digest and its entries.

        `name_of` gives its name. Files that are unchanged since an earlier snapshot are not read.

        Args:
            source: the code.
            git: asks git about the top directory; None for a new one.

        Raises:
            SubmitError: the code is too large, cannot be read, or cannot be written to the store.
        """
        try:
            private_dirs.make(self._files.directory)
            self._remove_leftovers()
            cache = StatCache(self._stat_file(source.top))
            for _ in range(_TRIES):
                found = self._read(listed(source, git), cache)
                digest = _digest(found)
                missing = self._build(name_of(digest), found)
                if not missing:
                    with contextlib.suppress(OSError):  # the next submission reads the files again
                        cache.save()
                    return digest, found
                cache.forget(missing)
        except OSError as error:
            raise SubmitError(
                f"the code cannot be copied to {self.directory}: {error.strerror}", NO_SNAPSHOT
            ) from error
        raise SubmitError(f"files of {source.top} change all the time", NO_SNAPSHOT)

    def link(self, name: str, source: CodeSource, job_dir: Path) -> None:
        """Link a job to its snapshot.

        Raises:
            SubmitError: the snapshot was removed, or the link cannot be written.
        """
        place = self.path(name)
        tree = place / _tree_name(source.top)
        try:
            os.utime(place)
            os.symlink(os.path.relpath(tree, job_dir), job_dir / CODE)
        except FileNotFoundError as error:
            raise SubmitError(
                f"the code of the job is not kept any more: {place} was removed"
            ) from error
        except OSError as error:
            raise SubmitError(f"{job_dir / CODE} cannot be written: {error.strerror}") from error

    def _stat_file(self, top: Path) -> Path:
        return self.directory / "stat" / hashlib.sha256(os.fsencode(top)).hexdigest()[:32]

    def _read(self, listed: Snapshot, cache: StatCache) -> Snapshot:
        """Return the snapshot with the digest of each file; copy new files into the store.

        Raises:
            SubmitError: a file cannot be read.
            OSError: the store cannot be written.
        """
        entries = []
        for entry in listed.entries:
            if entry.kind != "file":
                entries.append(entry)
                continue
            path = os.path.join(listed.root, entry.path)
            mode = 0o555 if entry.mode & 0o100 else 0o444
            try:
                status = os.lstat(path)
                digest = cache.digest(entry.path, status)
                size = entry.size if digest is None else status.st_size
                if digest is None:
                    with open(path, "rb") as stream:
                        digest, size = self._files.add(stream, mode)
                    if size == status.st_size:
                        cache.keep(entry.path, status, digest)
            except FileNotFoundError:
                continue  # it was removed since the directory was listed
            entries.append(replace(entry, mode=mode, size=size, value=digest))
        return replace(listed, entries=tuple(entries))

    def _build(self, name: str, found: Snapshot) -> list[str]:
        """Make a snapshot's directory unless it is intact; return the files that the store lacks.

        Raises:
            OSError: the directory cannot be written; no part of it is left.
        """
        place = self.path(name)
        changed = False
        with contextlib.suppress(FileNotFoundError):
            os.utime(place)
            changed = True
            if _is_tree_intact(place / _tree_name(found.root), found):
                return []
        part, aside = (self.directory / f"{_PART}{secrets.token_hex(8)}" for _ in range(2))
        tree = os.path.join(part, _tree_name(found.root))
        made = [tree]
        missing = []
        try:
            os.makedirs(tree, mode=0o700)
            for entry in found.entries:
                target = os.path.join(tree, entry.path)
                if entry.kind == "dir":
                    os.mkdir(target, 0o700)
                    made.append(target)
                elif entry.kind == "link":
                    os.symlink(_link_target(found.root, entry), target)
                elif not self._files.link(entry, target):
                    missing.append(entry.path)
            if missing:
                return missing
            for folder in _with_modules(found):  # Python may keep its compiled files
                os.mkdir(os.path.join(tree, folder, "__pycache__"), 0o700)
            for folder in reversed(made):
                os.chmod(folder, 0o555)  # noqa: S103
            if changed:  # by a job
                place.rename(aside)
            part.rename(place)
        except OSError:
            if not place.exists():  # otherwise another submission has made it meanwhile
                raise
        finally:
            _remove(part)
            _remove(aside)
        return []

    def _remove_leftovers(self) -> None:
        """Remove the incomplete snapshots of submissions that were killed."""
        for entry in os.scandir(self.directory):
            with contextlib.suppress(OSError):
                if entry.name.startswith(_PART) and files.is_old(Path(entry.path)):
                    _remove(Path(entry.path))

    # -- removing ----------------------------------------------------------------------------------

    def path(self, name: str) -> Path:
        """Return the directory of a snapshot."""
        return self.directory / name

    def exists(self, name: str) -> bool:
        """Return whether a snapshot is in the store."""
        return _NAME.fullmatch(name) is not None and self.path(name).is_dir()

    def unused(self, fresh: float = FRESH, without: Collection[str] = ()) -> list[str]:
        """Return the names of the snapshots that no job directory links to.

        Args:
            without: names of job directories that do not count.
            fresh: seconds after its last submission for which a snapshot counts as used.

        Raises:
            OSError: the job directories or the snapshots cannot be listed.
        """
        linked = set(self._linked(without))
        found = []
        try:
            entries = list(os.scandir(self.directory))
        except FileNotFoundError:
            return []
        for entry in entries:
            if _NAME.fullmatch(entry.name) and entry.name not in linked:
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime >= fresh:
                        found.append(entry.name)
        return found

    def _linked(self, without: Collection[str] = ()) -> Iterator[str]:
        """Yield the name of each job's snapshot, without those of some job directories."""
        for job in os.scandir(self._home / "jobs"):
            if job.name in without:
                continue
            with contextlib.suppress(OSError):  # jobs without a snapshot have no such link
                yield Path(os.readlink(os.path.join(job.path, CODE))).parent.name

    def size(self, name: str) -> int:
        """Return the bytes that the removal of a snapshot would free.

        Files that other snapshots share are not counted.
        """
        total = 0
        for folder, _, names in os.walk(self.path(name)):
            for each in names:
                with contextlib.suppress(OSError):
                    status = os.lstat(os.path.join(folder, each))
                    # Two links: this snapshot and `files`.
                    total += status.st_size if status.st_nlink <= 2 else 0
        return total

    def remove(self, name: str) -> int:
        """Remove a snapshot and the files that only it has; return their bytes.

        A submission that uses it just now keeps it.

        Raises:
            OSError: it cannot be removed.
        """
        place = self.path(name)
        before = place.stat().st_mtime
        aside = self.directory / f"{_PART}{secrets.token_hex(8)}"
        place.rename(aside)
        if aside.stat().st_mtime != before or name in set(self._linked()):
            aside.rename(place)
            return 0
        own = {
            os.lstat(os.path.join(folder, each)).st_ino
            for folder, _, names in os.walk(aside)
            for each in names
        }
        _remove(aside)
        return self._files.remove_unlinked(lambda status: status.st_ino in own)

    def remove_files(self, fresh: float = FRESH) -> int:
        """Remove the files that no snapshot has; return their bytes.

        Args:
            fresh: seconds for which a new file is kept: a submission may be about to use it.
        """
        return self._files.remove_unlinked(lambda status: time.time() - status.st_ctime >= fresh)


def name_of(digest: str) -> str:
    """Return the name of a snapshot with this digest; it is short, as tracebacks show it."""
    return digest[:20]


def _digest(found: Snapshot) -> str:
    """Return the digest of a snapshot: of its directory's name and content."""
    named = replace(
        found,
        entries=(
            SnapshotEntry(_tree_name(found.root), "dir", mode=0, size=0, value=""),
            *(
                replace(entry, value=_link_target(found.root, entry))
                if entry.kind == "link"
                else entry
                for entry in found.entries
            ),
        ),
    )
    return named.digest


def _tree_name(top: Path) -> str:
    return top.name or "root"


def _link_target(root: Path, entry: SnapshotEntry) -> str:
    """Return the target of a link in a snapshot: absolute if it leaves the directory."""
    place = os.path.join(root, os.path.dirname(entry.path))
    target = os.path.normpath(os.path.join(place, entry.value))
    inside = os.path.isabs(entry.value) or f"{target}/".startswith(f"{root}/")
    return entry.value if inside else target


def _with_modules(found: Snapshot) -> list[str]:
    """Return the directories with Python modules."""
    return sorted(
        {
            os.path.dirname(entry.path)
            for entry in found.entries
            if entry.kind == "file" and entry.path.endswith(".py")
        }
    )


def _is_tree_intact(tree: Path, found: Snapshot) -> bool:
    """Return whether no job has changed or removed a file of a snapshot."""
    return all(
        is_intact(os.path.join(tree, entry.path), entry.size)
        for entry in found.entries
        if entry.kind == "file"
    )


def _remove(folder: Path) -> None:
    """Remove a snapshot's directory with its read-only directories."""
    for place, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            os.chmod(place, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
