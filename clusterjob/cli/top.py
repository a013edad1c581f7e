"""The command `top`: a live screen of jobs, nodes and ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from clusterjob.cli.job_filters import NAMED_JOBS
from clusterjob.errors import ClusterJobError, UsageError


def top(
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ID...]",
            help=f"{NAMED_JOBS} (default: jobs that have not ended, and the latest that have).",
        ),
    ] = None,
) -> int:
    """Show jobs, their nodes and ranks on a live screen; ? shows its keys.

    It needs textual, the extra `top`; `status --watch` works without it.
    """
    from clusterjob.core.records import Records

    wanted = [Records().find(text) for text in ids] if ids else None
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        raise UsageError(
            "top needs a terminal", "`clusterjob status --watch` prints lines; so does `metrics`"
        )
    if importlib.util.find_spec("textual") is None:
        raise UsageError(
            "top needs textual, which is not installed",
            f"{shlex.quote(sys.executable)} -m pip install textual; `clusterjob status --watch` "
            "works without it",
        )
    from clusterjob.cli.top_screen import Top

    for name in ("COLUMNS", "LINES"):  # they do not change with the terminal
        os.environ.pop(name, None)
    app = Top(wanted)
    with _no_questions():
        app.run()
    if app.crash is not None:
        raise ClusterJobError(
            f"the screen failed: {type(app.crash).__name__}: {app.crash}"
        ) from app.crash
    return app.return_code or 0


@contextlib.contextmanager
def _no_questions() -> Iterator[None]:
    """Let no thread ask for a password on the terminal, which the screen reads."""
    before = sys.stdin
    with open(os.devnull) as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = before
