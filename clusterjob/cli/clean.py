"""The command `clean`: remove ended jobs here and on their hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from clusterjob.cli.job_filters import NAMED_JOBS, States, Yes, confirmed
from clusterjob.cli.job_options import Json
from clusterjob.errors import SpecError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterjob.core.cleaning import EndedJob
    from clusterjob.node.verdict import JobState


def clean(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID...]", help=f"{NAMED_JOBS} (default: none).")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All ended jobs (default: no).")] = False,  # noqa: FBT002
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than", metavar="AGE", help="Jobs that ended before 12h or 30d (default: any)."
        ),
    ] = None,
    state: States = None,
    larger_than: Annotated[
        str | None,
        typer.Option(
            "--larger-than",
            metavar="SIZE",
            help="Jobs with more than 500M or 1G of files (default: any).",
        ),
    ] = None,
    dry_run: Annotated[  # noqa: FBT002
        bool, typer.Option("--dry-run", help="What would be removed, nothing done (default: no).")
    ] = False,
    yes: Yes = False,  # noqa: FBT002
    as_json: Json = False,  # noqa: FBT002
) -> int:
    """Remove ended jobs: records, logs, results in job directories, and code on hosts.

    All filters must match. A job that runs, waits or is UNKNOWN is never removed, and a job with an
    unreachable host keeps its record. The exit code is 1 if a job could not be removed.
    """
    from clusterjob.cli import output
    from clusterjob.core import cleaning
    from clusterjob.core.records import Records
    from clusterjob.core.units import show_size

    filters = bool(older_than or state or larger_than)
    if ids and (every or filters):
        raise UsageError(
            "job ids and --all, --older-than, --state or --larger-than are both given",
            "give only one of them",
        )
    if not (ids or every or filters):
        raise UsageError(
            "give job ids, or one of --all, --older-than, --state and --larger-than",
            "--dry-run shows what would be removed",
        )
    if ids:
        found, code = cleaning.named([Records().find(text, any_format=True) for text in ids])
    else:
        found, code = cleaning.find(
            cleaning.Wanted(
                _states(state or []),
                older_than=_age(older_than),
                larger_than=_size(larger_than),
            )
        )
    removable = [job for job in found if not job.kept]
    if not as_json:
        _print_found(found)
    elif dry_run or not found:
        _print_json(found, code, key="would_free")
    if not found and not code:
        if not as_json:
            output.print_message("no ended job matches")
        return 0
    unused = f", and {show_size(code)} of unused code" if code else ""
    what = f"{_jobs(len(removable))}, {show_size(sum(job.size for job in removable))}{unused}"
    if dry_run:
        output.print_message(f"would remove {what}")
        return 0
    if (removable or code) and not yes and not confirmed(f"Remove {what}?"):
        return 1
    done, code = cleaning.remove(found) if removable or code else (found, 0)
    if as_json:
        _print_json(done, code, key="freed")
    else:
        before = {job.record.job_id for job in found if job.kept}
        _print_kept([job for job in done if job.record.job_id not in before])
        freed = [job.size for job in done if not job.kept]
        output.print_message(f"removed {_jobs(len(freed))}, freed {show_size(sum(freed) + code)}")
    return 1 if any(job.kept for job in done) else 0


def _jobs(count: int) -> str:
    return f"{count} job{'' if count == 1 else 's'}"


def _states(texts: list[str]) -> frozenset[JobState]:
    from clusterjob.core.selection import parse_states

    states = parse_states(texts)
    if open_ := [state for state in states if not state.final]:
        raise UsageError(
            f"--state {open_[0]}: only ended jobs are removed", "`clusterjob cancel` ends jobs"
        )
    return states


def _age(text: str | None) -> int | None:
    from clusterjob.core.times import parse_age

    if text is None:
        return None
    if (seconds := parse_age(text)) is None:
        raise UsageError(f"--older-than {text!r} is not an age", "write 12h, 30d or 1d12h")
    return seconds


def _size(text: str | None) -> int | None:
    from clusterjob.core.units import parse_size

    try:
        return None if text is None else parse_size(text)
    except SpecError as error:
        raise UsageError(f"--larger-than {text!r} is not a size", "write 500M or 1G") from error


def _print_found(found: Sequence[EndedJob]) -> None:
    from clusterjob.cli import tables
    from clusterjob.core.times import show_local
    from clusterjob.core.units import show_size

    rows = [
        (
            job.record.job_id,
            job.state,
            show_size(job.size),
            job.record.cluster,
            show_local(job.record.submitted_at),
        )
        for job in found
        if not job.kept
    ]
    if rows:
        tables.print_table([("ID", "STATE", "SIZE", "CLUSTER", "SUBMITTED"), *rows], fit=True)
    _print_kept(found)


def _print_kept(jobs: Sequence[EndedJob]) -> None:
    from clusterjob.cli import output

    for job in jobs:
        if job.kept:
            output.print_message(f"job {job.record.job_id} is kept: {job.kept}")


def _print_json(jobs: Sequence[EndedJob], code: int, key: str) -> None:
    from clusterjob.cli import output

    output.print_json(
        {
            "jobs": [
                {
                    "id": job.record.job_id,
                    "state": job.state,
                    "bytes": job.size,
                    "kept": job.kept or None,
                }
                for job in jobs
            ],
            "code_bytes": code,
            key: sum(job.size for job in jobs if not job.kept) + code,
        }
    )
