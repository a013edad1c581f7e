"""The command `rerun`: submit an earlier job again."""

from __future__ import annotations

from typing import Annotated

import typer

from clusterjob.cli.job_options import Id


def rerun(
    job_id: Id,
    failed: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--failed",
            help="Only elements that are FAILED, LOST or PREEMPTED (default: all).",
        ),
    ] = False,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            "--secret",
            metavar="K[=FILE]",
            help="File with the value of a recorded secret; repeatable (default: this"
            " environment's value).",
        ),
    ] = None,
) -> int:
    """Submit a job again with its recorded code, arguments and environment; print the new id.

    The values of secrets are not recorded: they come from this environment or from --secret. The
    jobs that it waited for with --after are not waited for again.
    """
    from pathlib import Path

    from clusterjob.cli import output
    from clusterjob.core import jobs
    from clusterjob.core import rerun as core_rerun
    from clusterjob.core.job_secrets import Secret
    from clusterjob.core.records import Records

    record = Records().find(job_id)
    given = [Secret.parse(text).beside(Path.cwd()) for text in secret or ()]
    plan = core_rerun.plan(record, given, failed=failed)
    for note in plan.notes:
        output.print_message(note)
    try:
        print(jobs.submit(plan, record.cluster, detach=True).job_id, flush=True)
    except KeyboardInterrupt:
        output.print_message(f"interrupted: job {plan.job_id} is cancelled")
        raise
    return 0
