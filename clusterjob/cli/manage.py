"""The commands that ask after jobs and act on them: status, list, wait, cancel, logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from clusterjob.backends.base import Status
    from clusterjob.core.records import Record

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="Job ids, or beginnings of them.")]
OptionalIds = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ID...]", help="Job ids, or beginnings of them; default: jobs that have not ended."
    ),
]
Id = Annotated[str, typer.Argument(metavar="ID", help="A job id, or the beginning of one.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("status")(status)
    app.command("list")(list_jobs)
    app.command("wait")(wait)
    app.command("cancel")(cancel)
    app.command("logs")(logs)


def status(ids: OptionalIds = None, as_json: Json = False) -> int:  # noqa: FBT002
    """Show how jobs stand."""
    from clusterjob.cli import output
    from clusterjob.core import jobs
    from clusterjob.core.listing import row_of
    from clusterjob.core.records import Records

    records = Records()
    pairs = jobs.statuses([records.find(text) for text in ids]) if ids else jobs.unended()
    if as_json:
        output.print_json({"jobs": [output.job_json(record, now) for record, now in pairs]})
    elif not pairs:
        output.say("no job is running; `clusterjob list` shows those that have ended")
    else:
        output.print_jobs([row_of(record, now) for record, now in pairs], together=not ids)
        if ids:
            output.print_verdicts(pairs)
    return 0


def list_jobs(as_json: Json = False) -> int:  # noqa: FBT002
    """List all jobs, the oldest first."""
    from clusterjob.cli import output
    from clusterjob.core.listing import Listing
    from clusterjob.core.records import Records

    if as_json:
        from clusterjob.core import jobs

        output.print_json(
            {
                "jobs": [
                    output.job_json(record, now) for record, now in jobs.statuses(Records().all())
                ]
            }
        )
    else:
        found = Listing(Records())
        states: list[tuple[Record, Status]] = []
        if found.open:
            from clusterjob.core import jobs  # what asks clusters takes long to import

            states = jobs.statuses(found.open)
        output.print_jobs(found.with_states(states), together=True)
        output.print_broken(found.broken)
    return 0


def wait(job_id: Id) -> int:
    """Wait for a job's end; end with its exit code.

    Says why nobody can tell how it stands, where that is so. Of an array, with the first that is
    not 0.
    """
    from clusterjob.cli import output
    from clusterjob.core import jobs
    from clusterjob.core.records import Records
    from clusterjob.node.verdict import JobState

    record = Records().find(job_id)
    if record.array is not None:
        return jobs.wait_for_all([record], output.print_end)
    troubles: set[str] = set()

    def say_trouble(status: Status) -> None:
        if status.state is JobState.UNKNOWN and status.reason not in troubles:
            troubles.add(status.reason)
            output.say(f"job {record.job_id}: {status.reason}")

    verdict = jobs.wait(record, say_trouble)
    output.say_end(record, verdict)
    return verdict.exit_code


def cancel(ids: Ids) -> int:
    """Stop jobs on all of their nodes."""
    from clusterjob.cli import output
    from clusterjob.core import jobs
    from clusterjob.core.records import Records

    records = Records()
    output.print_cancelled(jobs.cancel([records.find(text) for text in ids]))
    return 0


def logs(
    job_id: Id,
    follow: Annotated[  # noqa: FBT002
        bool, typer.Option("--follow", "-f", help="Go on as the job writes, until it ends.")
    ] = False,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, metavar="N", help="Only this worker's lines.")
    ] = None,
    node: Annotated[
        int | None, typer.Option("--node", min=0, metavar="N", help="Only this node's lines.")
    ] = None,
    tail: Annotated[
        int | None,
        typer.Option("--tail", min=0, metavar="N", help="Only the last N lines of what is there."),
    ] = None,
    raw: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--raw", help="The workers' bytes as they are: no labels, terminal escapes too."
        ),
    ] = False,
) -> int:
    """Show the workers' output, all ranks in the order of time.

    With -f, go on until the job ends, and end with its exit code.
    """
    from clusterjob.cli import watch
    from clusterjob.core.records import Records

    job = watch.Watch(Records().find(job_id), rank, node=node, raw=raw)
    if tail is not None or not follow:
        job.so_far(tail)
    return job.to_the_end() if follow else 0
