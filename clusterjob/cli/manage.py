"""The commands on existing jobs: `status`, `list`, `wait`, `cancel`, `logs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from clusterjob.cli.job_options import Id, Json

if TYPE_CHECKING:
    from clusterjob.backends.base import Status
    from clusterjob.core.records import Record

Ids = Annotated[
    list[str], typer.Argument(metavar="ID...", help="Job ids, or unique prefixes of them.")
]
OptionalIds = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ID...]",
        help="Job ids, or unique prefixes of them (default: jobs that have not ended).",
    ),
]


def status(ids: OptionalIds = None, as_json: Json = False) -> int:  # noqa: FBT002
    """Show the status of jobs."""
    from clusterjob.cli import output
    from clusterjob.core import polling
    from clusterjob.core.listing import row_of
    from clusterjob.core.records import Records

    wanted = [Records().find(text) for text in ids or ()]
    pairs = polling.statuses(wanted) if ids else polling.unfinished()
    if as_json:
        output.print_json({"jobs": [output.job_json(record, now) for record, now in pairs]})
    elif not pairs:
        output.print_message("no job is running; `clusterjob list` shows those that have ended")
    else:
        output.print_jobs([row_of(record, now) for record, now in pairs], together=not ids)
        if ids:
            output.print_verdicts(pairs)
    return 0


def list_jobs(as_json: Json = False) -> int:  # noqa: FBT002
    """List all jobs, oldest first."""
    from clusterjob.cli import output
    from clusterjob.core.listing import Listing
    from clusterjob.core.records import Records

    if as_json:
        from clusterjob.core import polling

        output.print_json(
            {
                "jobs": [
                    output.job_json(record, now)
                    for record, now in polling.statuses(Records().all())
                ]
            }
        )
    else:
        found = Listing(Records())
        states: list[tuple[Record, Status]] = []
        if found.open:
            from clusterjob.core import polling  # slow import, needed only for open jobs

            states = polling.statuses(found.open)
        output.print_jobs(found.with_states(states), together=True)
        output.print_broken(found.broken)
    return 0


def wait(job_id: Id) -> int:
    """Wait for a job to end, and exit with its exit code.

    While the state is UNKNOWN, the command prints the reason. For an array, the exit code is the
    first one that is not 0.
    """
    from clusterjob.cli import output
    from clusterjob.core import polling
    from clusterjob.core.records import Records
    from clusterjob.node.verdict import JobState

    record = Records().find(job_id)
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


def cancel(ids: Ids) -> int:
    """Cancel jobs on all of their nodes."""
    from clusterjob.cli import output
    from clusterjob.core import jobs
    from clusterjob.core.records import Records

    output.print_cancelled(jobs.cancel([Records().find(text) for text in ids]))
    return 0


def logs(
    job_id: Id,
    follow: Annotated[  # noqa: FBT002
        bool,
        typer.Option("--follow", "-f", help="Output until the job ends (default: output so far)."),
    ] = False,
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank", min=0, metavar="N", help="Rank of the worker to show (default: all)."
        ),
    ] = None,
    node: Annotated[
        int | None, typer.Option("--node", min=0, metavar="N", help="Node to show (default: all).")
    ] = None,
    tail: Annotated[
        int | None,
        typer.Option(
            "--tail", min=0, metavar="N", help="Number of last lines to show (default: all)."
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

    With -f, continue until the job ends, and exit with its exit code.
    """
    from clusterjob.cli import watch
    from clusterjob.core.records import Records

    job = watch.Watch(Records().find(job_id), rank, node=node, raw=raw)
    if tail is not None or not follow:
        job.so_far(tail, follow=follow)
    return job.to_the_end() if follow else 0
