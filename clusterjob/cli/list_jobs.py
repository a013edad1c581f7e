"""The command `list`: the newest jobs first, filters, and a view that follows changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from clusterjob.cli.job_filters import Name, States
from clusterjob.cli.job_options import Json
from clusterjob.errors import UsageError

if TYPE_CHECKING:
    import os

    from clusterjob.backends.base import Status
    from clusterjob.core.record_index import ListRow
    from clusterjob.core.records import Record
    from clusterjob.core.selection import Selection

_DEFAULT = 20  # jobs


def list_jobs(
    number: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--limit",
            min=1,
            metavar="N",
            help="Maximum number of jobs (default: 20; all with --json).",
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="All jobs (default: 20).")] = False,  # noqa: FBT002
    state: States = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="NAME", help="Cluster (default: any).")
    ] = None,
    name: Name = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="TIME",
            help="Jobs submitted since 2h, 3d, 14:30, yesterday or 2026-11-24 (default: any).",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            "--columns",
            metavar="LIST",
            help="Columns: id, name, state, code, nodes, cluster, backend, submitted, started,"
            " ended, duration, backend_id (Slurm's id), hosts, restarts, values (of a sweep),"
            " reason (default: most).",
        ),
    ] = None,
    with_efficiency: Annotated[  # noqa: FBT002
        bool,
        typer.Option("--efficiency", help="Columns of what each job used (default: no)."),
    ] = False,
    watch: Annotated[  # noqa: FBT002
        bool,
        typer.Option("--watch", "-w", help="A table that follows changes; Ctrl-C ends it."),
    ] = False,
    as_json: Json = False,  # noqa: FBT002
) -> int:
    """List jobs, the newest first.

    A terminal shows ages and lines that fit into its width; otherwise times are local and no line
    is cut.
    """
    from clusterjob.cli import efficiency, job_table, output
    from clusterjob.core.selection import Selection, parse_states
    from clusterjob.core.times import parse_point

    if number is not None and every:
        raise UsageError("--all and -n are both given", "give only one of them")
    if as_json and (watch or columns):
        raise UsageError(
            f"--json and {'--watch' if watch else '--columns'} are both given",
            "--json prints all fields once",
        )
    if with_efficiency and watch:
        raise UsageError("--efficiency and --watch are both given", "give only one of them")
    selection = Selection(
        parse_states(state or ()),
        name=name or "",
        cluster=cluster or "",
        since=parse_point(since) if since else None,
    )
    if as_json:
        return _print_json(selection, number, with_efficiency=with_efficiency)
    wanted = job_table.DEFAULT if columns is None else job_table.parse_columns(columns)
    # A duration changes at each poll. Without a terminal, each change prints the whole table.
    steady = [name for name in wanted if name != "duration"] if columns is None else wanted
    limit = None if every else number or _DEFAULT
    if watch:
        from clusterjob.cli import redraw

        redraw.show(
            lambda size: _lines(
                selection, limit, columns=wanted if size is not None else steady, size=size
            )
        )
        return 0
    rows, more, broken = _newest(selection, limit)
    if with_efficiency:
        columns_left = [name for name in wanted if columns is not None or name != "reason"]
        efficiency.print_table(rows, columns_left)
    else:
        job_table.print_jobs(rows, wanted, together=True, fit=True)
    if more:
        output.print_message(f"and {more} more: --all")
    output.print_broken(broken)
    return 0


def _newest(selection: Selection, limit: int | None) -> tuple[list[ListRow], int, list[str]]:
    """Return rows of the newest jobs, the number of other jobs, and unreadable records."""
    from clusterjob.core.listing import Listing
    from clusterjob.core.records import Records

    listing = Listing(Records())
    jobs, more = listing.select(selection, limit, ask=_statuses)
    return [row for job in jobs for row in job.rows], more, listing.broken


def _statuses(records: Sequence[Record]) -> list[tuple[Record, Status]]:
    from clusterjob.core import polling  # slow import, needed only for open jobs

    return polling.statuses(records)


def _lines(
    selection: Selection,
    limit: int | None,
    columns: Sequence[str],
    size: os.terminal_size | None,
) -> list[str]:
    """Return the table as lines that fit into a terminal."""
    from clusterjob.cli import job_table, tables

    rows, more, broken = _newest(selection, limit)
    cells = job_table.cells(rows, columns, together=True, ages=size is not None)
    lines = tables.table_lines(cells, None if size is None else size.columns)
    room = len(lines) if size is None else max(1, size.lines - 2)
    more += max(0, len(lines) - room)
    rest = [f"and {more} more: --all"] if more else []
    if broken:
        rest.append(f"{len(broken)} records cannot be read: `clusterjob list` names them")
    return [*lines[:room], *(rest if size is None else [tables.cut("; ".join(rest), size.columns)])]


def _print_json(selection: Selection, limit: int | None, *, with_efficiency: bool) -> int:
    from clusterjob.backends import shared
    from clusterjob.cli import efficiency, output
    from clusterjob.core.listing import Listing
    from clusterjob.core.records import Records

    records = Records()
    listing = Listing(records)
    polled: dict[str, tuple[Record, Status]] = {}

    def ask(wanted: Sequence[Record]) -> list[tuple[Record, Status]]:
        pairs = _statuses(wanted)
        polled.update((record.job_id, (record, status)) for record, status in pairs)
        return pairs

    shown = []
    for job in listing.select(selection, limit, ask=ask)[0]:
        for row in job.rows:
            if not selection.has_state([row.state]):
                continue
            pair = polled.get(row.job_id)
            if pair is None and (record := records.read(row.job_id)) is not None:
                pair = (record, shared.ended(record.verdict)) if record.verdict else None
            if pair is not None:
                used = efficiency.of_jobs([pair])[0] if with_efficiency else None
                shown.append(output.job_json(*pair, used))
    output.print_json({"jobs": shown})
    output.print_broken(listing.broken)
    return 0
