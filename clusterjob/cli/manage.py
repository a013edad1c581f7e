"""The commands on existing jobs: `status`, `wait`, `cancel`, `open`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from clusterjob.cli.job_filters import (
    NAMED_JOBS,
    LatestId,
    Name,
    States,
    Yes,
    confirmed,
    named_or_latest,
)
from clusterjob.cli.job_options import Json
from clusterjob.errors import ClusterJobError, RecordError, UsageError

if TYPE_CHECKING:
    from clusterjob.backends.base import Status
    from clusterjob.core.record_index import ListRow

OptionalIds = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ID...]", help=f"{NAMED_JOBS} (default: jobs that have not ended)."),
]


def status(
    ids: OptionalIds = None,
    watch: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--watch", "-w", help="A table that follows the jobs' phases; Ctrl-C ends it."
        ),
    ] = False,
    as_json: Json = False,  # noqa: FBT002
) -> int:
    """Show the status of jobs.

    With --watch, the command ends when the named jobs have ended.
    """
    from clusterjob.backends import job_progress
    from clusterjob.cli import efficiency, job_table, output, tables
    from clusterjob.core import polling
    from clusterjob.core.listing import row_of
    from clusterjob.core.records import Records
    from clusterjob.insight import silence, stragglers

    if as_json and watch:
        raise UsageError("--json and --watch are both given", "--json prints all fields once")
    wanted = [Records().find(text, any_format=True) for text in ids or ()]
    if watch:
        from clusterjob.cli import watch_status

        watch_status.show(wanted)
        if not ids:
            return 0
    pairs = polling.statuses(wanted) if ids else polling.unfinished()
    pairs = [
        (record, replace(now, stragglers=stragglers.now(record.job_dir, now)))
        for record, now in pairs
    ]
    if as_json:
        used = efficiency.of_jobs(pairs)
        shown = [output.job_json(*pair, one) for pair, one in zip(pairs, used, strict=True)]
        output.print_json({"jobs": shown})
    elif not pairs:
        output.print_message("no job is running; `clusterjob list` shows those that have ended")
    else:
        if not watch or tables.terminal_size() is not None:  # else its last table is there
            rows = [_with_phase(row_of(record, now), now) for record, now in pairs]
            # The verdict below has the whole reason of an ended job.
            ended = all(now.verdict is not None for _, now in pairs)
            job_table.print_jobs(rows, together=not ids, fit=bool(ids) and ended)
        for record, now in pairs:
            if text := silence.hint(record, now):
                output.print_message(f"job {record.job_id}: {text}")
            if text := job_progress.straggler_text(now.stragglers):
                output.print_message(f"job {record.job_id}: {text}")
        if ids:
            output.print_verdicts(pairs)
        if len(wanted) == 1 and pairs:
            efficiency.print_below(wanted[0], pairs)
    return 0


def _with_phase(row: ListRow, now: Status) -> ListRow:
    """Return the row with the job's phase as its reason, if the state does not show the phase."""
    from clusterjob.cli.phase_text import phase_text

    if now.reason or now.verdict is not None or now.progress is None:
        return row
    text = phase_text(now, has_output=True)
    if text == "running":
        return row
    return row._replace(reason="; ".join(filter(None, (text, row.reason))))


def wait(job_id: LatestId = None) -> int:
    """Wait for a job to end, and exit with its exit code.

    While the state is UNKNOWN, the command prints the reason. For an array, the exit code is the
    first one that is not 0.
    """
    from clusterjob.cli import output
    from clusterjob.core import polling
    from clusterjob.node.verdict import JobState

    record = named_or_latest(job_id, any_format=True)
    if record.array is not None:
        return polling.wait_for_all([record], output.print_end)
    reasons: set[str] = set()

    def print_reason(status: Status) -> None:
        if status.state is JobState.UNKNOWN and status.reason not in reasons:
            reasons.add(status.reason)
            output.print_message(f"job {record.job_id}: {status.reason}")

    verdict = polling.wait(record, print_reason)
    output.print_verdict(record, verdict)
    return verdict.exit_code


def cancel(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID...]", help=f"{NAMED_JOBS} (default: none).")
    ] = None,
    every: Annotated[  # noqa: FBT002
        bool, typer.Option("--all", help="All jobs that have not ended (default: no).")
    ] = False,
    state: States = None,
    name: Name = None,
    stacks: Annotated[  # noqa: FBT002
        bool,
        typer.Option("--stacks", help="Save the stacks of the workers in the logs (default: no)."),
    ] = False,
    yes: Yes = False,  # noqa: FBT002
) -> int:
    """Cancel jobs on all of their nodes.

    With --state or --name, the jobs that have not ended and match both are cancelled. If they are
    several, the command asks first.
    """
    from clusterjob.cli import output
    from clusterjob.core import jobs, polling
    from clusterjob.core.records import Records
    from clusterjob.core.selection import Selection, parse_states

    if ids and (every or state or name):
        raise UsageError(
            "job ids and --all, --state or --name are both given", "give only one of them"
        )
    if not (ids or every or state or name):
        raise UsageError(
            "give job ids, or one of --all, --state and --name", "`clusterjob status` shows the ids"
        )
    if ids:
        wanted = [Records().find(text, any_format=True) for text in ids]
    else:
        selection = Selection(parse_states(state or ()), name=name or "")
        wanted = polling.open_jobs(selection)
        if not wanted:
            output.print_message("no job that has not ended matches")
            return 0
        whole = list(dict.fromkeys(record.whole_id for record in wanted))
        if len(whole) > 1 and not yes:
            output.print_message(f"{len(whole)} jobs: {', '.join(whole)}")
            if not confirmed(f"Cancel {len(whole)} jobs?"):
                return 1
    errors: dict[str, ClusterJobError] = {}
    done = jobs.cancel(
        wanted,
        stacks=stacks,
        on_error=None
        if ids and len(ids) == 1
        else lambda record, error: errors.update({record.job_id: error}),
    )
    output.print_cancelled([pair for pair in done if pair[0].job_id not in errors])
    for job_id, error in errors.items():
        output.print_message(f"job {job_id} is not cancelled: {error.message}")
    return 1 if errors else 0


def open_job(job_id: LatestId = None) -> int:
    """Print the directory of a job, for example for cd "$(clusterjob open @)"."""
    from clusterjob.core.records import Records
    from clusterjob.node.system.sanitize import sanitize

    record = Records().find(job_id or "@", any_format=True)
    if not record.job_dir.is_dir():
        raise RecordError(
            f"the directory {record.job_dir} of job {record.job_id} does not exist",
            "an element of an array has none before it starts"
            if record.index is not None
            else f"`clusterjob status {record.job_id}` shows its state",
        )
    print(sanitize(str(record.job_dir)))
    return 0
