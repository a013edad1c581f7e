"""Remember the digests of files by their status, so that unchanged files are not read again."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

from clusterjob.node.system import files, private_dirs

_SCHEMA = 1
# A file that changes again within one step of the file system's clock keeps its times. Steps are
# at most 2 s long (FAT). Git's name for such a file is "racily clean".
_RACY_NS = 2_000_000_000
Stamp = tuple[int, int, int, int]


class StatCache:
    """The digests of one directory's files.

    Args:
        path: the file with the digests of the last snapshot.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began_ns = time.time_ns()
        self._old = _load(path)
        self._new: dict[str, tuple[Stamp, str]] = {}

    def digest(self, path: str, status: os.stat_result) -> str | None:
        """Return the digest of a file with this status; None if the file must be read.

        Args:
            path: path of the file relative to the directory.
            status: the file's status, without following a link.
        """
        kept = self._old.get(path)
        if kept is None or kept[0] != _stamp(status):
            return None
        self._new[path] = kept
        return kept[1]

    def keep(self, path: str, status: os.stat_result, digest: str) -> None:
        """Remember a digest, unless the file may change again without a change of its status."""
        newest = max(status.st_mtime_ns, status.st_ctime_ns)
        if newest < self._began_ns - _RACY_NS:
            self._new[path] = (_stamp(status), digest)

    def forget(self, paths: Iterable[str]) -> None:
        """Forget the digests of files, so that they are read again."""
        for path in paths:
            self._old.pop(path, None)
            self._new.pop(path, None)

    def save(self) -> None:
        """Write the digests; raise OSError if that fails."""
        if self._new == self._old:
            return
        private_dirs.make(self._path.parent)
        rows = {path: (*stamp, digest) for path, (stamp, digest) in self._new.items()}
        files.write_atomic(
            self._path,
            json.dumps({"schema": _SCHEMA, "files": rows}).encode(errors="surrogatepass"),
        )


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _load(path: Path) -> dict[str, tuple[Stamp, str]]:
    try:
        data = files.read_json(path)
        if isinstance(data, dict) and data["schema"] == _SCHEMA:
            return {
                name: ((size, modified, changed, inode), str(digest))
                for name, (size, modified, changed, inode, digest) in data["files"].items()
            }
    except (OSError, KeyError, TypeError, ValueError, AttributeError):
        pass
    return {}
