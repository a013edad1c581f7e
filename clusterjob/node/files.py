"""Files that are whole or absent: written aside, flushed to the disk, then renamed into place."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_atomic(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file so that a reader, or a crash, finds the old content or the new and never a part.

    Args:
        path: where the file is to be; its directory exists.
        data: the content.
        mode: permission bits, set before the first byte is written.

    Raises:
        OSError: the disk is full or the directory cannot be written; nothing is left behind.
    """
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
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


def write_json(path: Path, value: Any, mode: int = 0o600) -> None:
    """Write a value as JSON, atomically."""
    write_atomic(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode(errors="surrogatepass"), mode)


def read_json(path: Path) -> Any | None:
    """Return what `write_json` wrote, or None when the file is absent or is not JSON."""
    try:
        return json.loads(path.read_bytes().decode(errors="surrogatepass"))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
