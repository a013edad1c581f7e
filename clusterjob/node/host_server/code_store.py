"""Code of jobs: a store of files by digest, and one complete copy of a job's code."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from clusterjob.node.logs.job_dir import ARCHIVE, CODE, CODE_LIST
from clusterjob.node.system import files, private_dirs

_CHUNK = 1 << 20
_MAX_LIST = 256 << 20  # maximum bytes of an unpacked list of files
_DIGEST_LENGTH = 64  # hexadecimal digits of a SHA-256
_FRESH = 3600.0  # seconds for which a received file is kept: its job may not be installed yet


class Part:
    """A number of bytes of a stream.

    Args:
        read: returns at most the given number of the stream's next bytes.
        size: the number of bytes.
    """

    def __init__(self, read: Callable[[int], bytes], size: int) -> None:
        self._read = read
        self._left = size

    def read(self, most: int) -> bytes:
        """Return at most `most` of the next bytes; empty at the end.

        Raises:
            EOFError: the stream has ended before.
        """
        wanted = min(most, self._left)
        data = self._read(wanted)
        if len(data) < wanted:
            raise EOFError
        self._left -= wanted
        return data


def _blob(home: Path, digest: str) -> Path:
    return home / "store" / digest[:2] / digest


def install(home: Path, job: str, read: Callable[[int], bytes]) -> dict[str, Any]:
    """Create a job's copy of the code if the store has all its files.

    Args:
        home: clusterjob's directory on this host.
        job: the job.
        read: returns the list of files as compressed JSON, each (path, kind, mode, size, digest or
            target).

    Returns:
        ``missing``: the digests that must be sent first; empty if the copy is complete.

    Raises:
        OSError: the disk is full, or a file cannot be written; the incomplete copy is removed.
    """
    code, packed = home / "jobs" / job / CODE, read(_MAX_LIST)
    if code.exists():  # another node of the job, with the same home directory, created it
        return {"missing": []}
    return {"missing": sorted(build(home, code, packed, listed=code.with_name(CODE_LIST)))}


def build(home: Path, code: Path, packed: bytes, listed: Path) -> set[str]:
    """Create a complete copy of the code; return the digests that are missing in the store.

    Args:
        home: clusterjob's directory on this host, with the store.
        code: path of the copy.
        packed: the list of files, as for `install`.
        listed: path for the list.

    Raises:
        OSError: the disk is full, or a file cannot be written; the incomplete copy is removed.
    """
    entries = json.loads(zlib.decompress(packed))
    missing = {
        digest
        for _, kind, _, size, digest in entries
        if kind == "file" and not is_stored(home, digest, size)
    }
    if missing:
        return missing
    part = Path(tempfile.mkdtemp(prefix=f".{CODE}.", dir=code.parent))
    try:
        for path, kind, mode, _, value in entries:
            target = part / os.fsdecode(path.encode(errors="surrogateescape"))
            if kind == "dir":
                target.mkdir(exist_ok=True)
                target.chmod(mode | 0o700)
            elif kind == "link":
                os.symlink(value, target)
            else:
                shutil.copyfile(_blob(home, value), target)
                target.chmod(mode)
        files.write_atomic(listed, packed)  # `clean` reads it
        part.chmod(0o755)
        part.rename(code)
    except OSError:
        if not code.exists():  # otherwise another node has created it meanwhile
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)  # a complete copy has been renamed
    return missing


def has_file(home: Path, digest: str, length: int) -> dict[str, Any]:
    """Return in ``stored`` whether the store has a file; the file counts as used now."""
    stored = is_stored(home, digest, length)
    if stored:
        os.utime(_blob(home, digest))
    return {"stored": stored}


def is_stored(home: Path, digest: str, size: int) -> bool:
    """Return whether the store has a file."""
    try:
        status = os.stat(_blob(home, digest))
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == size


def add(home: Path, read: Callable[[int], bytes]) -> tuple[str, int]:
    """Add a file to the store; return the digest and size of what was read.

    Args:
        home: clusterjob's directory on this host.
        read: returns at most the given number of the next bytes; empty at the end.

    Raises:
        OSError: the file cannot be read or written.
    """
    private_dirs.make(home / "store")
    handle, temporary = tempfile.mkstemp(prefix=".", dir=home / "store")
    found, size = hashlib.sha256(), 0
    try:
        with os.fdopen(handle, "wb") as copy:
            while data := read(_CHUNK):
                found.update(data)
                size += len(data)
                copy.write(data)
        digest = found.hexdigest()
        private_dirs.make(_blob(home, digest).parent)
        os.replace(temporary, _blob(home, digest))
    finally:
        Path(temporary).unlink(missing_ok=True)
    return digest, size


def receive(
    home: Path, listed: list[tuple[str, int]], read: Callable[[int], bytes]
) -> dict[str, Any]:
    """Add received files to the store.

    Args:
        home: clusterjob's directory on this host.
        listed: (digest, size) of each file, in the order of the bytes.
        read: returns at most the given number of the next bytes.

    Returns:
        ``wrong``: the digests of files that arrived damaged.

    Raises:
        OSError: the disk is full, or the store cannot be written.
    """
    wrong = [digest for digest, size in listed if add(home, Part(read, size).read)[0] != digest]
    return {"wrong": wrong}


def clean(home: Path, gone: Collection[str], *, remove: bool) -> int:
    """Return the bytes of the stored files that no job uses; with `remove`, remove the files.

    A job needs its archive until its end: it may start, or start again, on another node. It does
    not need its code in the store: a file that is used again is sent again.

    Args:
        home: clusterjob's directory on this host.
        gone: names of jobs that do not count.
        remove: whether to remove the files.

    Raises:
        OSError: the jobs cannot be listed.
    """
    try:
        jobs = [path for path in (home / "jobs").iterdir() if path.name not in gone]
    except FileNotFoundError:  # nothing was sent to this host
        return 0
    used = {digest for job in jobs for digest in _digests(job / CODE_LIST)}
    used |= {files.read_text(job / ARCHIVE, _DIGEST_LENGTH) for job in jobs}
    size = 0
    for folder, _, names in os.walk(home / "store"):  # also files of an `add` that was killed
        for name in names:
            blob = Path(folder, name)
            with contextlib.suppress(OSError):  # another process removes it
                status = blob.lstat()
                if name not in used and time.time() - status.st_mtime > _FRESH:
                    if remove:
                        blob.unlink()
                    size += status.st_blocks * 512
    return size


def _digests(path: Path) -> list[str]:
    """Return the digests in a job's list of files; none if there is no list."""
    with contextlib.suppress(OSError, ValueError, zlib.error):
        entries = json.loads(zlib.decompress(path.read_bytes()))
        return [digest for _, kind, _, _, digest in entries if kind == "file"]
    return []
