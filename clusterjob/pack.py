"""The node zip: the package as one file that travels with a job, so that a host needs nothing installed by us."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

NAME = "clusterjob-node.pyz"
LIMIT = 150_000  # bytes; more would show at every submission to many hosts (a test holds the line)
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the same package gives the same bytes


def node_zip() -> bytes:
    """Return the package as a zip that Python runs, and imports from when it is on PYTHONPATH.

    All of the package, so that it may shadow an installed one of another version. Sources alone: compiled files would
    serve one version of Python, save 30 ms of the agent's start and triple the size.
    """
    package = Path(__file__).resolve().parent
    sources = sorted(path for path in package.rglob("*.py") if "__pycache__" not in path.parts)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        _add(archive, "__main__.py", (package / "node" / "zip_main.py").read_bytes())
        for path in sources:
            _add(archive, f"clusterjob/{path.relative_to(package).as_posix()}", path.read_bytes())
    return buffer.getvalue()


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED, compresslevel=9)
