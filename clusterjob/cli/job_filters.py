"""Options that select jobs, and the question before several jobs are changed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from clusterjob.errors import UsageError

if TYPE_CHECKING:
    from clusterjob.core.records import Record

NAMED_JOBS = "Job ids, unique prefixes of them, @ for the latest job (@2: the one before), or names"
LatestId = Annotated[
    str | None,
    typer.Argument(
        metavar="[ID]", help="Job id, unique prefix of it, or job name (default: @, the latest)."
    ),
]
States = Annotated[
    list[str] | None,
    typer.Option(
        "--state", metavar="STATE", help="State, or its beginning; repeatable (default: any)."
    ),
]
Name = Annotated[
    str | None,
    typer.Option("--name", metavar="GLOB", help="Job name, such as 'train-*' (default: any)."),
]
Yes = Annotated[
    bool, typer.Option("--yes", "-y", help="No question first (default: ask on the terminal).")
]


def named_or_latest(job_id: str | None, *, any_format: bool = False) -> Record:
    """Return the job of a `LatestId`; without an id, print that of the latest job."""
    from clusterjob.cli.output import print_message
    from clusterjob.core.records import Records

    record = Records().find(job_id or "@", any_format=any_format)
    if job_id is None:
        print_message(f"job {record.job_id}")
    return record


def confirmed(question: str) -> bool:
    """Ask a question on the terminal and return whether the answer is yes.

    Raises:
        UsageError: there is no terminal.
    """
    if not sys.stdin.isatty():
        raise UsageError(
            f"{question} There is no terminal to answer on", "--yes does it without a question"
        )
    return typer.confirm(question, err=True)
