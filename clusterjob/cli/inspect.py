"""The commands env (this process's place in a job), config (settings), trust (a project's
configuration) and doctor (checks).
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from clusterjob.cli.job_options import flags_given, with_job_options

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("env")(env)
    app.command("config")(config)
    app.command("trust")(trust)
    app.command("doctor")(with_job_options(doctor))


def env(as_json: Json = False) -> int:  # noqa: FBT002
    """Show the place in a job that is found here, and why.

    Which variable gave which field, what was ignored, what conflicts; exit code 1 if something
    does.
    """
    from clusterjob.node.environments import show

    return show.show(as_json=as_json)


def config(
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="NAME", help="The profile, or backend, to show."),
    ] = None,
    as_json: Json = False,  # noqa: FBT002
) -> int:
    """Show the settings that hold here, and where each was set."""
    import os
    from pathlib import Path

    from clusterjob.backends import base
    from clusterjob.cli import output
    from clusterjob.core.config import resolve

    settings = resolve(
        {},
        cluster,
        environ=os.environ,
        directory=Path.cwd(),
        backends=base.names(),
        fallback=base.preferred,
    )
    if as_json:
        output.print_json(output.settings_json(settings))
    else:
        output.print_settings(settings)
    return 0


def trust(
    path: Annotated[
        str,
        typer.Argument(
            metavar="[PATH]", help="A configuration file, or a directory in its project."
        ),
    ] = ".",
    yes: Annotated[bool, typer.Option("--yes", help="Trust it without asking.")] = False,  # noqa: FBT002
) -> int:
    """Show what a project's configuration file executes, and trust it.

    Trust ends when the content of the file changes, or of the ssh configuration, template or host
    file that it names.
    """
    import sys
    from pathlib import Path

    from clusterjob.cli import output
    from clusterjob.core import config
    from clusterjob.core import trust as trusted
    from clusterjob.errors import UsageError
    from clusterjob.node.system.sanitize import sanitize

    file = config.project_file(Path(path))
    if trusted.is_trusted(file.path, file.data):
        output.say(f"{file.path} is trusted already")
        return 0
    lines = trusted.lines_of(file.data)
    output.say(f"{file.path} executes or follows {len(lines)} line{'' if len(lines) == 1 else 's'}")
    for line in lines:
        print(f"  {sanitize(line.text())}", file=sys.stderr)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(
                f"{file.path} is not trusted: there is no terminal to ask",
                "--yes trusts it without asking",
            )
        if not typer.confirm("Trust it?", err=True):
            return 1
    trusted.record(file.path, file.data)
    output.say(f"{file.path} is trusted")
    return 0


def doctor(as_json: Json = False, **flags: Any) -> int:  # noqa: FBT002
    """Check whether a cluster is fit for a job; ends with 1 if something failed.

    Takes the options that the job would have. Starts nothing.
    """
    from pathlib import Path

    from clusterjob.cli import output
    from clusterjob.core import jobs
    from clusterjob.core.trust import Use
    from clusterjob.doctor.engine import CheckState

    directory = Path.cwd()
    cluster = flags.pop("cluster")
    settings = jobs.settle(flags_given(flags), cluster, directory=directory, use=Use())
    done = []
    for check in jobs.examine(settings, directory):
        done.append(check)
        if not as_json:
            output.print_check(check)
    bad = any(check.state is CheckState.FAILED for check in done)
    if as_json:
        found = [vars(check) for check in done]
        output.print_json(
            {
                "cluster": settings.cluster,
                "backend": settings.backend,
                "fit": not bad,
                "checks": found,
            }
        )
    return 1 if bad else 0
