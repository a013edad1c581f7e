"""The command `logs`: the workers' output, with filters."""

from __future__ import annotations

from typing import Annotated

import typer

from clusterjob.cli.job_filters import LatestId, named_or_latest
from clusterjob.errors import SpecError, UsageError

Ranks = Annotated[
    list[str] | None,
    typer.Option("--rank", metavar="LIST", help="Ranks, such as 0-3,7; repeatable (default: all)."),
]
Nodes = Annotated[
    list[str] | None,
    typer.Option("--node", metavar="LIST", help="Nodes, such as 0-3,7; repeatable (default: all)."),
]


def logs(
    job_id: LatestId = None,
    follow: Annotated[  # noqa: FBT002
        bool,
        typer.Option("--follow", "-f", help="Output until the job ends (default: output so far)."),
    ] = False,
    rank: Ranks = None,
    node: Nodes = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="TIME",
            help="Lines of the last 10m before each node's newest line, or since 14:30 or "
            "2026-11-24T14:30 by the node's clock (default: all).",
        ),
    ] = None,
    grep: Annotated[
        str | None,
        typer.Option(
            "--grep",
            metavar="REGEX",
            help="Lines with a match of a Python regular expression (default: all).",
        ),
    ] = None,
    stderr: Annotated[bool, typer.Option("--stderr", help="Only stderr (default: both).")] = False,  # noqa: FBT002
    attempt: Annotated[
        int | None,
        typer.Option(
            "--attempt",
            min=0,
            metavar="N",
            help="Attempt of a requeued job, from 0 (default: all).",
        ),
    ] = None,
    tail: Annotated[
        int | None,
        typer.Option(
            "-n", "--tail", min=0, metavar="N", help="Number of last lines to show (default: all)."
        ),
    ] = None,
    raw: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--raw",
            help="Unchanged output with terminal escapes and without labels (default: no).",
        ),
    ] = False,
) -> int:
    """Show the workers' output, all ranks in chronological order.

    With -f, continue until the job ends, and exit with its exit code. All filters can be combined.
    Of an array, the output of each element is shown in turn, labelled with its index and values.
    """
    from clusterjob.cli import watch
    from clusterjob.core.times import parse_age, parse_point

    age = None if since is None else parse_age(since)
    shown = watch.Filters(
        ranks=numbers("--rank", rank),
        nodes=numbers("--node", node),
        attempt=attempt,
        stream="err" if stderr else None,
        since=parse_point(since).timestamp() if since is not None and age is None else None,
        last=age,
        grep=grep,
    )
    record = named_or_latest(job_id, any_format=True)
    if record.array is not None:
        return watch.elements(record, shown, raw=raw, tail=tail, follow=follow)
    job = watch.Watch(record, shown, raw=raw)
    if tail is not None or not follow:
        job.so_far(tail, follow=follow)
    return job.to_the_end() if follow else 0


def numbers(option: str, texts: list[str] | None) -> tuple[int, ...] | None:
    """Return the numbers of an option's lists, such as 0-3,7; None if it is not given."""
    from clusterjob.core import arrays

    if not texts:
        return None
    text = ",".join(texts)
    try:
        return arrays.indices(text, f"{option} {text}")
    except SpecError as error:
        raise UsageError(error.message, f"{option} 0-3,7 selects five") from error
