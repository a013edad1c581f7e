"""Read files with limits, and write them atomically: temporary file, flush to disk, rename."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any

TEMPORARY = ".tmp"  # the end of the name of a temporary file
RESERVED = 32 << 10  # bytes that `reserve` takes
_PROBE = 1 << 16  # bytes that `why_full` writes
LARGEST_JSON = 32 << 20  # bytes; clusterjob's own files are much smaller
# The thread in which an agent uses the job's directory: a shared disk may hang for minutes, and the
# event loop must send heartbeats meanwhile. None in other processes.
disk: ThreadPoolExecutor | None = None


def use_thread() -> None:
    """Let `later` use a thread from now on; the thread does one thing after the other."""
    global disk  # noqa: PLW0603 - a process runs one agent
    disk = ThreadPoolExecutor(1, "clusterjob-disk")


def later(action: Callable[..., object], *args: object) -> None:
    """Call a function in the disk's thread; at once in a process without one.

    An OSError, as of a full disk, loses what it writes. Another error in the thread is handled as
    that of a thread which ends by it.
    """
    if disk is None:
        with contextlib.suppress(OSError):
            action(*args)
    else:
        disk.submit(_call, action, *args)


def _call(action: Callable[..., object], *args: object) -> None:
    try:
        action(*args)
    except OSError:
        pass
    except Exception:
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), None)))


def write_atomic(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file atomically: a reader gets the old or the new content, also after a crash.

    Args:
        path: path of the file; its directory exists.
        data: the content.
        mode: permission bits, set before the first byte is written.

    Raises:
        OSError: the disk is full or the directory cannot be written; no temporary file remains.
    """
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=TEMPORARY, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            os.fchmod(stream.fileno(), mode)
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


class Appender:
    """Append to a file that stays open: on a shared disk, each open costs a round trip.

    Args:
        path: path of the file; the first `write` creates it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream: FileIO | None = None

    def write(self, data: bytes) -> None:
        """Append bytes in one write.

        Raises:
            OSError: the file cannot be created, or the disk is full.
        """
        if self._stream is None:
            self._stream = FileIO(self._path, "a")
        self._stream.write(data)
        os.fstat(self._stream.fileno())  # an NFS client then sends the data to the server

    def __del__(self) -> None:
        if self._stream is not None:
            self._stream.close()


def reserve(path: Path) -> None:
    """Reserve the space and the inode of a file that must be written even on a full disk.

    If the disk is full already, nothing is reserved and no error is raised.
    """
    # Without fallocate(2), as on NFS, glibc reads and writes the blocks, and refuses O_APPEND.
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    with (
        contextlib.suppress(OSError),
        FileIO(os.open(_reserve_of(path), flags, 0o600), "w") as file,
    ):
        os.posix_fallocate(file.fileno(), 0, RESERVED)


def write_reserved(path: Path, data: bytes) -> None:
    """Write a file atomically, in the space that `reserve` took, if it did.

    Raises:
        OSError: the disk is full, and the reserve is missing or smaller than `data`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    with contextlib.suppress(FileNotFoundError):
        _reserve_of(path).replace(temporary)
    # It keeps the blocks of the reserve: others would take them at once on a full disk.
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb") as stream:
        stream.write(data)
        stream.truncate()
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def _reserve_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.reserve")


def why_full(directory: Path) -> str:
    """Return why no file can be written into a directory, such as a full disk; empty if one can."""
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as probe:
            probe.write(bytes(_PROBE))
            os.fsync(probe.fileno())
    except OSError as error:
        return f"{directory} cannot be written: {error.strerror}"
    return ""


def write_json(path: Path, value: Any, mode: int = 0o600) -> None:
    """Write a value as JSON, atomically."""
    write_atomic(path, json_bytes(value), mode=mode)


def json_bytes(value: Any) -> bytes:
    """Return a value as JSON, in the format of clusterjob's files."""
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode(errors="surrogatepass")


def listed(folder: str) -> list[str]:
    """Return the sorted names in a directory; none if it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def read_regular(path: Path, limit: int) -> bytes:
    """Return a regular file's content, with a size limit; never block on a pipe or a device.

    Raises:
        ValueError: the file is longer than `limit` bytes, or is not a regular file.
        OSError: the file cannot be read.
    """
    with open(
        path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
    ) as stream:
        found = os.fstat(stream.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
            raise ValueError(f"{path} is no regular file of at most {limit} bytes")
        return stream.read(found.st_size)


def open_log(path: Path) -> int:
    """Return the descriptor of a log for appending; a new one is for its owner alone.

    Raises:
        OSError: it cannot be opened.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def read_text(path: Path | str, limit: int = -1) -> str:
    """Return a text file, such as one in /proc; empty if it cannot be read.

    Args:
        path: the file.
        limit: maximum number of characters to read; -1 for all.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(limit)
    except (OSError, ValueError):  # ValueError: the path contains a zero byte
        return ""


def tree_size(path: Path) -> int:
    """Return the bytes on disk of a directory tree; 0 if it does not exist.

    Other file systems in it do not count.
    """
    import subprocess  # slow to load

    done = subprocess.run(
        ["du", "-skx", path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
    )
    return int(done.stdout.split()[0]) << 10 if done.stdout else 0


def remove_tree(path: Path) -> None:
    """Remove a directory tree, also directories that their owner cannot write.

    Nothing happens if it does not exist, or if another process removes it meanwhile.

    Raises:
        OSError: it is no directory, cannot be removed, or another file system is mounted in it.
    """
    if path.is_symlink() or not path.is_dir():  # rmtree would open a pipe and wait
        if os.path.lexists(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        return
    _let_write(str(path))
    for folder, folders, _ in os.walk(path):
        for entry in (os.path.join(folder, name) for name in folders):
            if os.path.ismount(entry):
                raise OSError(errno.EBUSY, "another file system is mounted there", entry)
            _let_write(entry)
    shutil.rmtree(path, onerror=_raise_unless_missing)


def _let_write(folder: str) -> None:
    with contextlib.suppress(OSError):
        if not os.path.islink(folder):
            os.chmod(folder, 0o700)


def _raise_unless_missing(_function: Any, _name: str, error: Any) -> None:
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]


def size_of(path: Path) -> int:
    """Return a file's size in bytes; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def sha256(path: Path) -> str:
    """Return the SHA-256 digest of a file, as hexadecimal digits.

    Raises:
        OSError: the file cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while data := stream.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def read_json(path: Path) -> Any | None:
    """Return the value that `write_json` wrote, or None.

    None means that the file is absent, is too large or is not JSON.

    Raises:
        OSError: the file exists but cannot be read.
    """
    try:
        return json.loads(read_regular(path, LARGEST_JSON).decode(errors="surrogatepass"))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
