"""The commands that start or render jobs: `submit`, `run`, `rerun`, `render`, `launch`."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clusterjob.cli.job_filters import LatestId, named_or_latest
from clusterjob.cli.job_options import Json, flags_given, misplaced, own_options, program_of
from clusterjob.errors import ClusterJobError
from clusterjob.node.program import Program

if TYPE_CHECKING:
    from clusterjob.core.plans import Plan
    from clusterjob.core.records import Record


def submit(
    ctx: typer.Context,
    follow: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--follow",
            help="Output of the job until it ends; Ctrl-C leaves it running (default: no).",
        ),
    ] = False,
    dry_run: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--dry-run", help="Files and commands of the job, nothing started (default: no)."
        ),
    ] = False,
    as_json: Json = False,  # noqa: FBT002
    **flags: Any,
) -> int:
    """Start a job in the background and print its id.

    Only the id is printed on stdout.
    """
    if not dry_run:
        _show_beginning()
    from clusterjob.cli import output, watch

    plan, cluster = _plan(ctx, flags, dry=dry_run)
    if dry_run:
        return _print_plan(plan, as_json=as_json)
    _print_notes(plan)
    record = _submit(plan, cluster, detach=True, follow=follow)
    if as_json:
        output.print_json(
            {
                "id": record.job_id,
                "cluster": cluster,
                "backend": record.backend,
                "job_dir": str(record.job_dir),
            }
        )
    else:
        _print_id(record)
    return watch.until_end(record)() if follow else 0


def _show_beginning() -> None:
    """Show a first live line before the slow imports; the command or its error removes it."""
    from clusterjob.core.live import live

    live.clear_at_sigterm()
    live.show(["preparing the job"])


def _submit(
    plan: Plan, cluster: str, *, detach: bool, follow: bool = False, stdin: int | None = None
) -> Record:
    from clusterjob.cli import output
    from clusterjob.core import jobs
    from clusterjob.core.live import live

    live.prints_steps = follow
    live.show([f"submitting to {cluster}"])
    try:
        return jobs.submit(plan, cluster, detach=detach, stdin=stdin)
    except KeyboardInterrupt:
        output.print_message(f"interrupted: job {plan.job_id} is cancelled")
        raise
    finally:
        live.clear()


def _print_id(record: Record) -> None:
    try:
        print(record.job_id, flush=True)
    except OSError as error:  # the job runs, so the error must contain its id
        raise ClusterJobError(
            f"{error.strerror}: standard output", f"the job runs; its id is {record.job_id}"
        ) from error


def _own_stdin() -> int | None:
    """Return the file descriptor of stdin; None if rank 0 cannot read from it.

    It cannot if stdin is closed, or if this command runs in the background of a terminal.
    """
    try:
        os.fstat(0)
    except OSError:
        return None
    try:
        return 0 if os.tcgetpgrp(0) == os.getpgrp() else None
    except OSError:  # not a terminal, or the terminal of another session
        return 0


def run(ctx: typer.Context, **flags: Any) -> int:
    """Start a job, show its output, and exit with its exit code.

    Ctrl-C interrupts the workers, which have --grace seconds to save and exit. A second Ctrl-C
    stops them at once. If this command is killed, a job of the local cluster ends too; other jobs
    continue.
    """
    _show_beginning()
    from clusterjob.cli import output, watch
    from clusterjob.core import jobs

    plan, cluster = _plan(ctx, flags, foreground=True)
    _print_notes(plan)
    record = _submit(plan, cluster, detach=False, follow=True, stdin=_own_stdin())
    show = None
    try:
        show = watch.until_end(record)
        return show()
    except KeyboardInterrupt:
        show = show or watch.until_end(record)
    try:
        if jobs.interrupt(record):
            output.print_message(f"interrupting {record.job_id}; Ctrl-C again stops it at once")
            show()
            return 130
    except KeyboardInterrupt:
        pass
    output.print_message(f"cancelling {record.job_id}")
    jobs.cancel([record])
    show()
    return 130


def rerun(
    job_id: LatestId = None,
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
    from clusterjob.core import rerun as core_rerun
    from clusterjob.core.job_secrets import Secret

    record = named_or_latest(job_id)
    given = [Secret.parse(text).beside(Path.cwd()) for text in secret or ()]
    plan = core_rerun.plan(record, given, failed=failed)
    _print_notes(plan)
    _print_id(_submit(plan, record.cluster, detach=True))
    return 0


def render(ctx: typer.Context, as_json: Json = False, **flags: Any) -> int:  # noqa: FBT002
    """Print the files and commands of a job without starting it."""
    plan, _ = _plan(ctx, flags, dry=True)
    return _print_plan(plan, as_json=as_json)


def launch(ctx: typer.Context) -> int:
    """Start this node's part of a job, on the node itself.

    The job and the node rank are read from the environment.
    """
    from clusterjob.node.launch import main

    return main(ctx.args)


def _plan(
    ctx: typer.Context, flags: dict[str, Any], *, dry: bool = False, foreground: bool = False
) -> tuple[Plan, str]:
    from clusterjob.cli import output
    from clusterjob.core import job_settings, jobs
    from clusterjob.core.plans import PlannedFile
    from clusterjob.core.spec import program_arguments
    from clusterjob.node.logs.job_dir import STDIN_SCRIPT

    program = program_of(ctx)
    program, script = program.read_stream() or (program, b"")
    directory = Path.cwd()
    cluster = flags.pop("cluster")
    settings = job_settings.resolve(
        flags_given(flags),
        cluster,
        directory=directory,
        executes=not dry,
    )
    spec = job_settings.make_spec(program, settings, directory=directory)
    source = Program("script", str(spec.workdir / program.file)).source().decode(errors="replace")
    if words := misplaced(program, source, own_options(ctx.command)):
        line = [
            *ctx.command_path.split(),
            *words,
            *program_arguments(program)[: -len(program.args)],
        ]
        output.print_message(
            f"{' '.join(words)} went to the script, which does not contain such options;"
            f" clusterjob's options stand before it: {shlex.join(line)}"
        )
    plan = jobs.plan(spec, settings, foreground=foreground)
    if script:
        plan = replace(plan, files=(*plan.files, PlannedFile(plan.job_dir / STDIN_SCRIPT, script)))
    return plan, settings.cluster


def _print_plan(plan: Plan, *, as_json: bool) -> int:
    from clusterjob.cli import output
    from clusterjob.node.system.sanitize import sanitize

    if as_json:
        output.print_json(plan.to_json())
    else:
        print(sanitize(plan.text(), lines=True))
        _print_notes(plan)
    return 0


def _print_notes(plan: Plan) -> None:
    from clusterjob.cli import output

    for note in plan.notes:
        output.print_message(note)
