"""Keep the files of all snapshots: one for each content and mode, with hard links to it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from clusterjob.core.snapshot import SnapshotEntry
from clusterjob.node.system import private_dirs

_CHUNK = 1 << 20
# The modification time of each file, 2000-01-01. A job of root can write to a read-only file, which
# all snapshots share: another time shows it, and the file is copied again.
_KEPT_NS = 946_684_800 * 10**9


class FilePool:
    """The files of a store, as ``<xx>/<digest>-<mode>``.

    Args:
        directory: the directory of the files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def add(self, stream: BinaryIO, mode: int) -> tuple[str, int]:
        """Copy a file into the pool unless it has it; return its digest and size.

        The digest is that of the copy, so a file that changes meanwhile does no harm.

        Raises:
            OSError: the file cannot be read or written.
        """
        first = stream.read(_CHUNK)
        digest = hashlib.sha256(first).hexdigest()
        if len(first) < _CHUNK and is_intact(self._path(digest, mode), len(first)):
            return digest, len(first)
        handle, temporary = tempfile.mkstemp(prefix=".", dir=self.directory)
        found, size = hashlib.sha256(), 0
        try:
            with os.fdopen(handle, "wb") as copy:
                piece = first
                while piece:
                    found.update(piece)
                    size += len(piece)
                    copy.write(piece)
                    piece = stream.read(_CHUNK)
                copy.flush()
                os.fchmod(copy.fileno(), mode)
                os.utime(copy.fileno(), ns=(_KEPT_NS, _KEPT_NS))
            kept = self._path(found.hexdigest(), mode)
            private_dirs.make(kept.parent)
            os.replace(temporary, kept)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        return found.hexdigest(), size

    def link(self, entry: SnapshotEntry, target: str) -> bool:
        """Make a hard link to a file of a snapshot; return False if the pool lacks the file.

        Raises:
            OSError: the link cannot be written.
        """
        kept = self._path(entry.value, entry.mode)
        if not is_intact(kept, entry.size):
            return False
        try:
            os.link(kept, target)
        except FileNotFoundError:
            return False
        except OSError as error:
            # Too many links, such as to an empty __init__.py, or a file system without hard links.
            if error.errno not in (errno.EMLINK, errno.EPERM, errno.ENOTSUP, errno.EXDEV):
                raise
            shutil.copy2(kept, target)
        return True

    def remove_unlinked(self, wanted: Callable[[os.stat_result], bool]) -> int:
        """Remove the files that no snapshot has and whose status is wanted; return their bytes."""
        freed = 0
        for folder, _, names in os.walk(self.directory):
            for each in names:
                path = os.path.join(folder, each)
                with contextlib.suppress(OSError):
                    status = os.lstat(path)
                    if status.st_nlink == 1 and wanted(status):
                        os.unlink(path)
                        freed += status.st_size
        return freed

    def _path(self, digest: str, mode: int) -> Path:
        return self.directory / digest[:2] / f"{digest}-{mode:o}"


def is_intact(path: str | Path, size: int) -> bool:
    """Return whether a file of a snapshot or of the pool exists and nobody has written to it."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return status.st_mtime_ns == _KEPT_NS and status.st_size == size
