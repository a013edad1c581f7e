"""Build the node zip: the package as one file of the job, so hosts need no installation."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
from pathlib import Path

from clusterjob.node import zip_importer
from clusterjob.node.system import files, private_dirs

NAME = "clusterjob-node.pyz"
LIMIT = 200_000  # maximum bytes; a larger zip slows submissions to many hosts (a test checks it)
# Code that only submits jobs. It needs an installation; see `clusterjob.node.zip_importer`.
LEFT_OUT = (
    "api/event_loop.py",
    "api/functions.py",
    "api/job_options.py",
    "api/jobs.py",
    "api/notebook.py",
    "api/results.py",
    "api/waiting.py",
    "backends/",
    "cli/",
    "core/",
    "doctor/",
    "insight/",
    "remote/",
)
# The end of the package's __init__.py in the zip. It holds the importer, and all other modules in
# one compressed block, which is smaller than separate entries and loads faster. Python opens the
# zip for each file that it reads from it: a process opens it three times, whatever it imports.
# Deflate unpacks the block in 2 ms; bz2 is a quarter smaller, but needs 30 ms in each process that
# imports the package, and some interpreters lack it.
_INSTALL = """
import sys as _sys
_importer = type(_sys)("clusterjob.node.zip_importer")
_importer.__file__ = f"{{__path__[0]}}/node/zip_importer.py"
_sys.modules[_importer.__name__] = _importer
exec(compile({importer!r}, _importer.__file__, "exec"), _importer.__dict__)
_importer.install(__file__, {block!r})
"""
_DOCSTRING = re.compile(r'r?"""')
_COMMENT = re.compile(r"  # [^'\"]*$")  # after code; a string that begins so would end behind it
_END_BYTES = 22  # length of the end record of a zip without a comment
_MAX_KEPT = 4  # maximum number of zips of other sources (other environments) in the cache
_EPOCH = (1980, 1, 1, 0, 0, 0)  # fixed time, so equal sources give equal bytes


def node_zip(cache: Path | None = None) -> bytes:
    """Return the package as a zip that Python can run and that can be on PYTHONPATH.

    Inside a job, Python imports the zip even if a package is installed. `LEFT_OUT` lists the parts
    that it lacks. The zip contains sources only: compiled files would save 30 ms of the agent's
    start, but have three times the size and work with one version of Python only. Comments and
    docstrings are removed. Line numbers stay the same, so tracebacks show the lines of the source.

    In a process that runs from a node zip, that zip is returned.

    Args:
        cache: a private directory of the user where `keep` may have stored the zip of the same
            sources; None for no cache.
    """
    archive = zip_importer.archive()
    if archive is not None:
        return Path(archive).read_bytes()
    name = _kept_name()
    if cache is not None and (data := _kept(cache / name)) is not None:
        return data
    return _make(name)


def cache_directory() -> Path | None:
    """Return the directory where zips are kept between commands; None if others can change it.

    It is in the user's cache directory, such as ~/.cache/clusterjob (XDG_CACHE_HOME).
    """
    from platformdirs.unix import Unix  # the same directories on macOS

    place = Unix("clusterjob").user_cache_path
    try:
        return None if private_dirs.exposed(place) else place
    except OSError:
        return None


def keep(data: bytes, cache: Path | None) -> None:
    """Store the zip of the current sources in a cache directory, and remove old zips.

    An error, such as a full disk, is ignored.
    """
    if cache is None or zip_importer.archive() is not None:
        return
    kept = cache / _kept_name()
    try:
        if kept.exists() and kept.stat().st_size == len(data):
            return
        private_dirs.make(cache)
        files.write_atomic(kept, data)
        others = [path for path in cache.glob("node-*.pyz") if path != kept]
        for other in sorted(others, key=lambda path: path.stat().st_mtime)[:-_MAX_KEPT]:
            other.unlink(missing_ok=True)
    except OSError:
        pass


def _kept(path: Path) -> bytes | None:
    """Return a cached zip, or None if it is missing, truncated or not safe to run.

    Nodes run it, so it must belong to this user and be writable by no other user.
    """
    with contextlib.suppress(OSError), path.open("rb") as stream:
        status = os.fstat(stream.fileno())
        data = stream.read()
        if (
            status.st_uid == os.geteuid()
            and not status.st_mode & 0o022
            and data[-_END_BYTES:].startswith(b"PK\5\6")
        ):
            return data
    return None


def _sources() -> dict[str, Path]:
    """Return the source files of the zip by their path in the package."""
    package = Path(__file__).resolve().parent.parent
    found = sorted(path for path in package.rglob("*.py") if "__pycache__" not in path.parts)
    inside = {path.relative_to(package).as_posix(): path for path in found}
    return {name: path for name, path in inside.items() if not name.startswith(LEFT_OUT)}


def _kept_name() -> str:
    return f"node-{_fingerprint()}.pyz"


def _fingerprint() -> str:
    digest = hashlib.sha256()
    for name, path in _sources().items():
        stat = path.stat()
        digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}\n".encode())
    return digest.hexdigest()[:24]


@functools.cache
def _make(kept_name: str) -> bytes:  # noqa: ARG001 - the key of the cache
    """Build the zip of the current sources, which the name identifies."""
    import base64  # slow imports, needed only when the zip is not cached
    import io
    import zipfile
    import zlib

    texts = {
        f"clusterjob/{name}": bare(path.read_text(encoding="utf-8"))
        for name, path in _sources().items()
    }
    package = texts.pop("clusterjob/__init__.py")
    main = texts.pop("clusterjob/node/zip_main.py")
    importer_text = texts.pop("clusterjob/node/zip_importer.py")
    block = zlib.compress("\0".join(part for item in texts.items() for part in item).encode(), 9)
    package += _INSTALL.format(importer=importer_text, block=base64.b64encode(block).decode())
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in (("__main__.py", main), ("clusterjob/__init__.py", package)):
            info = zipfile.ZipInfo(name, _EPOCH)
            archive.writestr(info, text, zipfile.ZIP_DEFLATED, compresslevel=9)
    return buffer.getvalue()


def bare(source: str) -> str:
    """Return Python source with empty lines instead of comment lines and docstrings.

    Comments after code are removed too, unless they have quotes, and a level of indentation is one
    space instead of four.

    It scans the lines, which is 20 times as fast as Python's parser. It relies on the style of this
    package: a docstring has triple double quotes, is the first statement or follows a line that
    ends with a colon, and nothing follows it on its line. A test compares the result with
    that of the parser.
    """
    kept: list[str] = []
    closing, in_docstring, may_begin = "", False, True
    for line in source.split("\n"):
        text = line.lstrip()
        level = (len(line) - len(text)) // 4
        if closing:
            kept.append("" if in_docstring else line)
            if closing in line:
                closing, in_docstring = "", False
        elif not text or text.startswith("#"):
            kept.append("")
        elif may_begin and (quotes := _DOCSTRING.match(text)):
            kept.append(" " * level + '""')  # a body needs a statement
            in_docstring = '"""' not in text[quotes.end() :]
            closing, may_begin = '"""' if in_docstring else "", False
        else:
            kept.append(" " * level + _COMMENT.sub("", text))
            closing = next((each for each in ('"""', "'''") if line.count(each) % 2), "")
            may_begin = text.endswith(":")
    return "\n".join(kept)
