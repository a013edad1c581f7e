"""The command `report`, which writes a page about a job."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from clusterjob.cli.job_filters import LatestId, named_or_latest
from clusterjob.errors import UsageError


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
    from clusterjob.insight.report import make
    from clusterjob.node.system import files
    from clusterjob.node.system.sanitize import sanitize

    record = named_or_latest(job_id)
    path = None if output == "-" else _target(output, f"{record.job_id}.html")
    text = make.make(record)
    if path is None:
        sys.stdout.write(text)
        return 0
    files.write_atomic(path, text.encode())
    print(sanitize(os.path.relpath(path) if path.parent == Path.cwd() else str(path)))
    return 0


def _target(output: str | None, name: str) -> Path:
    """Return the file to write.

    Raises:
        UsageError: it exists, and is neither empty nor a report; or its directory does not exist.
    """
    from clusterjob.insight.report import page

    path = Path(name if output is None else output)
    if path.is_dir():
        path /= name
    path = path.resolve()  # a link stays a link
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no directory {path.parent}", "-o FILE names the file")
    if path.exists():
        begin = b"a pipe or a device"
        if path.is_file():
            with path.open("rb") as stream:
                begin = stream.read(4096)
        if begin and page.MARK.encode() not in begin:
            raise UsageError(
                f"{path} exists, and this command did not write it",
                "choose another name with -o FILE",
            )
    return path
