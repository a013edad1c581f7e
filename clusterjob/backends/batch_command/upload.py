"""What a platform's own upload is given: the working directory as a snapshot, and beside it what
starts a node.

    upload/...                          the working directory's files, where the job is to have them
    upload/clusterjob-entry/            what is sent along: clusterjob-node.pyz, entry.sh
    upload/clusterjob-entry/kept        what an upload of files may drop; the entry script makes it
    again

The platform's command applies ``.gitignore`` files below what it uploads. Ours were applied
already, and a ``*.pyz`` in one would drop the node zip: they are not sent. A link travels as a
link, wherever it points to, like over SSH: no command of a platform follows one by itself, and what
it points at may lie outside of the snapshot, or on the platform's own disks.
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
from clusterjob.core.snapshot import Entry, Snapshot
from clusterjob.core.spec import JobSpec
from clusterjob.errors import SubmitError

DIRECTORY = "upload"
# Where the entry script, the node zip and `KEPT` lie in what is sent. Without a dot: an upload may
# leave hidden files out.
OWN = "clusterjob-entry"
ENTRY = "entry.sh"
KEPT = "kept"
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Upload:
    """What is to be sent.

    Attributes:
        root: the directory that holds it, and nothing else.
        files: how many there are.
        size: bytes of all of them.
        digest: names the content of the code; empty where none is sent.
    """

    root: Path
    files: int
    size: int
    digest: str

    def remove(self) -> None:
        """Remove it: the platform has it, or nobody wants it any more."""
        shutil.rmtree(self.root, ignore_errors=True)


def stage(
    spec: JobSpec, job_dir: Path, files: Iterable[PlannedFile], limit: int = snapshot.LIMIT
) -> Upload:
    """Make what is to be sent: the working directory's files, unless the job is not to be
    synchronised, and ours.

    Args:
        spec: the job.
        job_dir: its directory.
        files: the entry script, the node zip and what else every node needs; they go by their names
            into `OWN`.
        limit: the bytes that the working directory may hold.

    Raises:
        SubmitError: the working directory holds too much, cannot be read, has a `OWN` of its own or
            changes meanwhile, or the copy cannot be written; nothing is left of it.
    """
    root = job_dir / DIRECTORY
    shutil.rmtree(root, ignore_errors=True)  # of a submitter that died
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
        goods = {file.path.name: (file.data, file.mode) for file in files}
        goods[KEPT] = (_kept(taken.entries) if taken is not None else b"", 0o600)
        for name, (data, mode) in goods.items():
            (own / name).write_bytes(data)
            (own / name).chmod(mode)
    except OSError as error:
        shutil.rmtree(root, ignore_errors=True)
        raise SubmitError(
            f"what is to be sent cannot be laid out in {root}: {error.strerror}: {error.filename}"
        ) from error
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
    total = sum(sizes) + sum(len(data) for data, _ in goods.values())
    count = (taken.files if taken is not None else 0) + len(goods)
    return Upload(root, count, size=total, digest=taken.digest if taken is not None else "")


def _code(workdir: Path, limit: int, *, include_secrets: bool) -> Snapshot:
    """Return what is sent of the working directory."""
    taken = snapshot.take(workdir, limit, include_secrets=include_secrets)
    if any(PurePosixPath(entry.path).parts[0] == OWN for entry in taken.entries):
        raise SubmitError(
            f"{workdir} has a {OWN!r} of its own, which is where ours is sent",
            f"leave it out in {snapshot.OWN_IGNORE}",
        )
    return Snapshot(
        taken.root,
        tuple(entry for entry in taken.entries if PurePosixPath(entry.path).name != ".gitignore"),
    )


def _copy(source: Path, target: Path, entry: Entry) -> int:
    """Copy one file, or make a directory; return the bytes.

    Raises:
        SubmitError: the file is no longer what it was when the snapshot was taken.
        OSError: it cannot be read, or the copy cannot be written.
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
    os.utime(
        path, ns=(status.st_atime_ns, status.st_mtime_ns)
    )  # by which an upload may tell what is new
    return entry.size


def _kept(entries: Iterable[Entry]) -> bytes:
    """Return what an upload of files may drop: links, directories, and that a file may be run;
    three texts each, with NUL behind each.
    """
    words: list[str] = []
    for entry in entries:
        if entry.kind == "dir":
            words += ["dir", entry.path, ""]
        elif entry.kind == "link":
            words += ["link", entry.path, entry.value]
        elif entry.mode & 0o100:
            words += ["run", entry.path, ""]
    return b"".join(os.fsencode(word) + b"\0" for word in words)
