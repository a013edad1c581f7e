"""The command `report`, which writes a page about a job."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from clusterjob.cli.job_filters import LatestId, named_or_latest
from clusterjob.errors import UsageError

_STDOUT = "-"


def report(
    job_id: LatestId = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="File, or - for stdout (default: ID.html)."
        ),
    ] = None,
) -> int:
    """Write one HTML page about a job, which needs no network to be read.

    It has the verdict, the timeline of every rank, metrics, stacks, last lines, environment and
    code. Of a running job, it shows the state of this moment. Of an array, it has a row for each
    element.
    """
    from clusterjob.insight.report import make, page

    record = named_or_latest(job_id)
    path = _target(output, f"{record.job_id}.html", page.MARK)
    _save(path, make.make(record))
    return 0


def _target(output: str | None, name: str, mark: str) -> Path | None:
    """Return the file to write; None for stdout.

    Raises:
        UsageError: the path exists, and is no empty file and no file with the mark of this command.
    """
    if output == _STDOUT:
        return None
    path = Path(name if output is None else output)
    if path.is_dir():
        path /= name
    path = path.resolve()  # a link stays a link
    if path.exists():
        begin = b"" if path.is_file() else b"a pipe or a device"
        if path.is_file():
            with path.open("rb") as stream:
                begin = stream.read(4096)
        if begin and mark.encode() not in begin:
            raise UsageError(
                f"{path} exists, and this command did not write it",
                "choose another name with -o FILE",
            )
    return path


def _save(path: Path | None, text: str) -> None:
    """Write a file atomically, and print its path; without a path, write to stdout."""
    from clusterjob.node.system.sanitize import sanitize

    if path is None:
        sys.stdout.write(text)
        return
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no directory {path.parent}", "-o FILE names the file")
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with open(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    print(sanitize(os.path.relpath(path) if path.parent == Path.cwd() else str(path)))
