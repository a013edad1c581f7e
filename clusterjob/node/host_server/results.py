"""Send results: list files in a job's working directory, and return their digests and bytes."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from clusterjob.node.host_server import requests
from clusterjob.node.system import files

MAX_BYTES = 4 << 20  # maximum bytes per answer
MAX_PARTS, MAX_DIGESTS = 1000, 10_000  # maximum numbers per request


def tree(root: Path, request: requests.Tree) -> tuple[dict[str, Any], bytes]:
    """List files, directories and links at paths below a directory.

    Args:
        root: the job's working directory.
        request: the paths, relative to it.

    Returns:
        ``absent``: the paths that do not exist. The bytes have one line of JSON for each file,
        directory and link: (path, kind, mode, size, modification time in ns, target of a link). A
        directory comes before its content.
    """
    entries: list[tuple[str, str, int, int, int, str]] = []
    absent = []
    for text in request.paths:
        path = os.path.normpath(os.path.join(root, text))
        if os.path.commonpath([path, root]) != str(root) or not os.path.lexists(path):
            absent.append(text)
        else:
            _walk(str(root), path, entries=entries, most=request.most)
    return {"absent": absent}, b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


def _walk(
    root: str, path: str, entries: list[tuple[str, str, int, int, int, str]], most: int
) -> None:
    if len(entries) >= most:
        raise OSError(0, f"more than {most} files: fetch fewer paths, or raise --max-files", path)
    status = os.lstat(path)
    name = os.path.relpath(path, root)
    mode = stat.S_IMODE(status.st_mode) & 0o777
    if stat.S_ISDIR(status.st_mode):
        if name != ".":
            entries.append((name, "dir", mode, 0, 0, ""))
        for child in sorted({*os.listdir(path)} - {".git"}):
            _walk(root, os.path.join(path, child), entries=entries, most=most)
    elif stat.S_ISLNK(status.st_mode):
        entries.append((name, "link", 0, 0, 0, os.readlink(path)))
    elif stat.S_ISREG(status.st_mode):
        entries.append((name, "file", mode, status.st_size, max(0, status.st_mtime_ns), ""))


def digests(root: Path, request: requests.Digests) -> dict[str, Any]:
    """Return the SHA-256 digests of files below a directory; empty for a missing file."""
    found = []
    for path in request.paths:
        try:
            found.append(files.sha256(root / path))
        except OSError:
            found.append("")
    return {"digests": found}


def get(root: Path, request: requests.Get) -> tuple[dict[str, Any], bytes]:
    """Return parts of files.

    Args:
        root: the job's working directory.
        request: the parts; at most `MAX_BYTES` bytes in total are sent.

    Returns:
        ``lengths``: the length of each part, which is smaller if a file became shorter; and the
        bytes of all parts.
    """
    lengths, data = [], bytearray()
    for path, offset, length in request.parts:
        part = b""
        with contextlib.suppress(FileNotFoundError), (root / path).open("rb") as stream:
            stream.seek(offset)
            part = stream.read(min(length, MAX_BYTES - len(data)))
        lengths.append(len(part))
        data += part
    return {"lengths": lengths}, bytes(data)
