"""Results on their way back: what lies in a job's working directory on this host, and the bytes of
it.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

MOST = 4 << 20  # bytes of one answer
MOST_PARTS, MOST_DIGESTS = 1000, 10_000  # of one question


def tree(root: Path, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Return what lies at paths below a directory.

    Args:
        root: the job's working directory.
        request: ``paths``, relative to it; ``most``: how many entries are wanted at most.

    Returns:
        ``absent``: the paths at which nothing lies. As bytes, a line of JSON for each file,
            directory and link, a directory before
        what is in it: (path, kind, mode, size, modification time in ns, target of a link).
    """
    entries: list[tuple[str, str, int, int, int, str]] = []
    absent = []
    for text in request["paths"]:
        path = os.path.normpath(os.path.join(root, text))
        if os.path.commonpath([path, root]) != str(root) or not os.path.lexists(path):
            absent.append(text)
        else:
            _walk(str(root), path, entries=entries, most=int(request["most"]))
    return {"absent": absent}, b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


def _walk(
    root: str, path: str, entries: list[tuple[str, str, int, int, int, str]], most: int
) -> None:
    if len(entries) >= most:
        raise OSError(0, f"more than {most} files: name a part of them, or raise --max-files", path)
    status = os.lstat(path)
    name = os.path.relpath(path, root)
    mode = stat.S_IMODE(status.st_mode) & 0o777
    if stat.S_ISDIR(status.st_mode):
        if name != ".":
            entries.append((name, "dir", mode, 0, 0, ""))
        for child in sorted(os.listdir(path)):
            _walk(root, os.path.join(path, child), entries=entries, most=most)
    elif stat.S_ISLNK(status.st_mode):
        entries.append((name, "link", 0, 0, 0, os.readlink(path)))
    elif stat.S_ISREG(status.st_mode):
        entries.append((name, "file", mode, status.st_size, max(0, status.st_mtime_ns), ""))


def digests(root: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Return the digests (SHA-256) of files: ``paths`` below a directory; empty for one that is
    gone.
    """
    found = []
    for path in request["paths"]:
        digest = hashlib.sha256()
        try:
            with (root / path).open("rb") as stream:
                while data := stream.read(1 << 20):
                    digest.update(data)
            found.append(digest.hexdigest())
        except OSError:
            found.append("")
    return {"digests": found}


def get(root: Path, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Return parts of files, one after the other.

    Args:
        root: the job's working directory.
        request: ``parts``, a list of (path, offset, length), not more than `MOST` bytes in all.

    Returns:
        ``lengths``: how much of each there was: less where a file has become shorter.
    """
    lengths, data = [], bytearray()
    for path, offset, length in request["parts"]:
        part = b""
        try:
            with (root / path).open("rb") as stream:
                stream.seek(offset)
                part = stream.read(min(length, MOST - len(data)))
        except FileNotFoundError:
            pass
        lengths.append(len(part))
        data += part
    return {"lengths": lengths}, bytes(data)
