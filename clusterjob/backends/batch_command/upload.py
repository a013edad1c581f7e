"""Prepare the directory that a platform uploads: the code and the entry files of a node.

    upload/...                      a snapshot of the working directory
    upload/clusterjob-entry/        the entry files: clusterjob-node.pyz, entry.sh
    upload/clusterjob-entry/kept    links, directories and modes that an upload may lose; the entry
                                    script restores them

``.gitignore`` files are not sent. The snapshot has already applied them, and the platform's command
would apply them again: a ``*.pyz`` line would exclude the node zip. As over SSH, a symbolic link is
restored as a link to any target: the target may be outside the snapshot or on the platform's disks.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from clusterjob.core import snapshot
from clusterjob.core.plans import PlannedFile
from clusterjob.core.snapshot.ignore_files import OWN_IGNORE
from clusterjob.core.spec import JobSpec
from clusterjob.errors import SubmitError

DIRECTORY = "upload"
# The directory of the entry script, the node zip and `KEPT` in the upload. Its name has no leading
# dot: an upload may skip hidden files.
OWN = "clusterjob-entry"
ENTRY = "entry.sh"
KEPT = "kept"
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Upload:
    """A directory to upload.

    Attributes:
        root: the directory; it contains only files to upload.
        files: the number of files.
        size: their total size in bytes.
        digest: the digest of the code; empty if no code is sent.
    """

    root: Path
    files: int
    size: int
    digest: str

    def remove(self) -> None:
        """Remove the directory, after the upload or an error."""
        shutil.rmtree(self.root, ignore_errors=True)


def stage(
    spec: JobSpec, job_dir: Path, files: Iterable[PlannedFile], limit: int = snapshot.LIMIT
) -> Upload:
    """Create the directory to upload: the entry files, and the code if the job sends it.

    Args:
        spec: the job.
        job_dir: the job's directory.
        files: the entry script, the node zip and other files for every node; they are stored in
            `OWN` under their names.
        limit: the maximum size of the working directory in bytes.

    Raises:
        SubmitError: the working directory is too large, cannot be read, contains a path `OWN`, or
            changes during the copy; or the copy cannot be written. No part of the copy is left.
    """
    root = job_dir / DIRECTORY
    shutil.rmtree(root, ignore_errors=True)  # left by a submitter that died
    try:
        root.mkdir(mode=0o700)
        taken = (
            _code(spec.workdir, limit, include_secrets=spec.include_secrets) if spec.sync else None
        )
        sizes = (
            [
                _copy(taken.root, root, entry=entry)
                for entry in taken.entries
                if entry.kind != "link"
            ]
            if taken is not None
            else []
        )
        own = root / OWN
        own.mkdir(mode=0o700)
        own_files = {file.path.name: (file.data, file.mode) for file in files}
        own_files[KEPT] = (_kept(taken.entries) if taken is not None else b"", 0o600)
        for name, (data, mode) in own_files.items():
            (own / name).write_bytes(data)
            (own / name).chmod(mode)
    except BaseException as error:
        shutil.rmtree(root, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise SubmitError(
            f"the upload cannot be written to {root}: {error.strerror}: {error.filename}"
        ) from error
    return Upload(
        root,
        (taken.files if taken is not None else 0) + len(own_files),
        size=sum(sizes) + sum(len(data) for data, _ in own_files.values()),
        digest=taken.digest if taken is not None else "",
    )


def _code(workdir: Path, limit: int, *, include_secrets: bool) -> snapshot.Snapshot:
    """Return the snapshot of the working directory, without ``.gitignore`` files."""
    taken = snapshot.take(workdir, limit, include_secrets=include_secrets)
    if any(PurePosixPath(entry.path).parts[0] == OWN for entry in taken.entries):
        raise SubmitError(
            f"{workdir} contains {OWN!r}, a name that clusterjob needs for its own files",
            f"exclude it in {OWN_IGNORE}",
        )
    return snapshot.Snapshot(
        taken.root,
        tuple(entry for entry in taken.entries if PurePosixPath(entry.path).name != ".gitignore"),
    )


def _copy(source: Path, target: Path, entry: snapshot.SnapshotEntry) -> int:
    """Copy a file or create a directory; return the file's size in bytes.

    Raises:
        SubmitError: the file has changed since the snapshot.
        OSError: the file cannot be read, or the copy cannot be written.
    """
    path = target / entry.path
    if entry.kind == "dir":
        path.mkdir(mode=entry.mode | 0o700)
        return 0
    found = hashlib.sha256()
    try:
        stream = (source / entry.path).open("rb")
    except FileNotFoundError:
        raise snapshot.changed(entry) from None
    with stream, path.open("xb") as copy:
        status = os.fstat(stream.fileno())
        while data := stream.read(_CHUNK):
            found.update(data)
            copy.write(data)
    if found.hexdigest() != entry.value:
        raise snapshot.changed(entry)
    path.chmod(entry.mode | 0o600)
    # An upload may use the modification time to find changed files.
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return entry.size


def _kept(entries: Iterable[snapshot.SnapshotEntry]) -> bytes:
    """Return the content of `KEPT`: links, directories and executable files.

    Each entry is three strings, each followed by NUL.
    """
    strings: list[str] = []
    for entry in entries:
        if entry.kind == "dir":
            strings += ["dir", entry.path, ""]
        elif entry.kind == "link":
            strings += ["link", entry.path, entry.value]
        elif entry.mode & 0o100:
            strings += ["run", entry.path, ""]
    return b"".join(os.fsencode(string) + b"\0" for string in strings)
