"""Keep the code of submitted jobs by digest, and give each job a copy of its own.

    store/<xx>/<digest>        the files of all jobs' code, as on a host (node/host_server)
    stat/<digest of path>      digests of a directory's files by their status
    jobs/<id>/tree/<name>      a job's copy with ordinary modes; jobs/<id>/code is a link to it
    jobs/<id>/code.list        the list of its files

The elements, attempts and restarts of a job share its copy. No other submission does.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import replace
from pathlib import Path

from clusterjob.core.snapshot import GIT, Snapshot, SnapshotEntry
from clusterjob.core.snapshot.git_revision import Git
from clusterjob.core.snapshot.source import NO_SNAPSHOT, CodeSource, listed
from clusterjob.core.snapshot.stat_cache import StatCache
from clusterjob.errors import SubmitError
from clusterjob.node.host_server import code_store
from clusterjob.node.logs.job_dir import CODE, CODE_LIST, TREE


def take(home: Path, source: CodeSource, git: Git | None = None) -> Snapshot:
    """Copy the code of a job into the store; files unchanged since the last job are not read.

    Args:
        home: clusterjob's directory.
        source: the code.
        git: asks git about the top directory; None for a new one.

    Returns:
        The files with the digests of their copies.

    Raises:
        SubmitError: the code is too large, cannot be read, or cannot be written to the store.
    """
    found = listed(source, git)
    stat_file = hashlib.sha256(os.fsencode(source.top)).hexdigest()[:32]
    cache = StatCache(home / "stat" / stat_file)
    entries = []
    try:
        for entry in found.entries:
            if entry.kind == "link":
                entries.append(replace(entry, value=_link_target(found.root, entry)))
            elif entry.kind == "dir":
                entries.append(entry)
            else:
                path = os.path.join(found.root, entry.path)
                try:
                    status = os.lstat(path)
                    digest, size = cache.digest(entry.path, status), status.st_size
                    if digest is None or not code_store.is_stored(home, digest, size):
                        with open(path, "rb") as stream:
                            digest, size = code_store.add(home, stream.read)
                        if size == status.st_size:
                            cache.keep(entry.path, status, digest)
                except FileNotFoundError:
                    continue  # it was removed since the directory was listed
                entries.append(replace(entry, size=size, value=digest))
    except OSError as error:
        raise SubmitError(
            f"the code cannot be copied to {home / 'store'}: {error.strerror}", NO_SNAPSHOT
        ) from error
    with contextlib.suppress(OSError):  # the next submission reads the files again
        cache.save()
    return replace(found, entries=tuple(entries))


def add_repository(home: Path, found: Snapshot) -> None:
    """Copy the files of a snapshot's .git directory into the store.

    Raises:
        OSError: a file cannot be read or written.
    """
    for entry in found.entries:
        if entry.kind == "file" and entry.path.startswith(f"{GIT}/"):
            with found.path(entry).open("rb") as stream:
                code_store.add(home, stream.read)


def place(home: Path, name: str, found: Snapshot, job_dir: Path) -> None:
    """Create a job's own copy of its code.

    Args:
        home: clusterjob's directory.
        name: the name of the copied directory, which scripts may import by this name.
        found: the files.
        job_dir: the job's directory.

    Raises:
        SubmitError: the store lacks a file, or the copy cannot be written.
    """
    tree = job_dir / TREE / (name or "root")
    try:
        tree.parent.mkdir(mode=0o700)
        if code_store.build(home, tree, found.packed(), listed=job_dir / CODE_LIST):
            raise SubmitError(f"the code of the job is not kept any more in {home / 'store'}")
        os.symlink(os.path.relpath(tree, job_dir), job_dir / CODE)
    except OSError as error:
        raise SubmitError(f"{tree} cannot be written: {error.strerror}", NO_SNAPSHOT) from error


def _link_target(root: Path, entry: SnapshotEntry) -> str:
    """Return the target of a link in a snapshot: absolute if it leaves the directory."""
    target = os.path.normpath(os.path.join(root, os.path.dirname(entry.path), entry.value))
    inside = os.path.isabs(entry.value) or f"{target}/".startswith(f"{root}/")
    return entry.value if inside else target
