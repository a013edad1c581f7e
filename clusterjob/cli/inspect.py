"""The commands `env`, `config`, `trust` and `doctor`, which do not start a job."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from clusterjob.cli.job_options import Json, flags_given
from clusterjob.errors import UsageError


def env(as_json: Json = False) -> int:  # noqa: FBT002
    """Show the detected environment and how it was found.

    The environment contains the rank assignment of this process in a job. The command lists the
    variable of each field, the ignored variables and the variables that conflict. The exit code is
    1 if variables conflict.
    """
    from clusterjob.cli import output
    from clusterjob.node.environments import this_node

    found = this_node.describe(this_node.detect(this_node.look_up(os.environ)))
    if as_json:
        output.print_json(found)
    else:
        print(_environment_text(found))
    return 1 if found["conflicts"] else 0


def _environment_text(found: Mapping[str, Any]) -> str:
    """Return the data of `describe` as text: each field with its value and its variable."""
    from clusterjob.node.environments.this_node import FIELDS
    from clusterjob.node.system.sanitize import sanitize

    rows = [
        (name, str(found[name]), found["evidence"].get(name, ""))
        for name in FIELDS
        if found[name] is not None
    ]
    rows = [("FIELD", "VALUE", "FROM"), *rows] if rows else []
    names, values = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    lines = [f"source: {found['source']}   level: {found['level']}"]
    lines += [f"{a:{names}}  {b:{values}}  {c}".rstrip() for a, b, c in rows]
    lines += [f"ignored: {item['variable']} ({item['why']})" for item in found["ignored"]]
    lines += [f"conflict: {conflict}" for conflict in found["conflicts"]]
    return "\n".join(sanitize(line) for line in lines)


def config(
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="NAME",
            help="Profile or backend to show (default: the configured one).",
        ),
    ] = None,
    as_json: Json = False,  # noqa: FBT002
) -> int:
    """Show the effective settings and where each is set."""
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
            metavar="[PATH]",
            help="Configuration file, or a directory in its project (default: the current one).",
        ),
    ] = ".",
    yes: Annotated[  # noqa: FBT002
        bool,
        typer.Option("--yes", help="Trust without a question (default: ask)."),
    ] = False,
) -> int:
    """Show and trust the configuration file of a project.

    The command shows the lines that the file executes, and asks for a confirmation. The trust ends
    when one of them changes, or the ssh configuration, template or host file in it.
    """
    from clusterjob.cli import output
    from clusterjob.core import config_files
    from clusterjob.core import trust as trusted
    from clusterjob.node.system.sanitize import sanitize

    file = config_files.project_file(Path(path))
    if trusted.is_trusted(file.path, file.data):
        output.print_message(f"{file.path} is already trusted")
        return 0
    lines = trusted.risky_settings(file.data)
    output.print_message(
        f"{file.path} executes or follows {len(lines)} line{'' if len(lines) == 1 else 's'}"
    )
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
    output.print_message(f"{file.path} is trusted")
    return 0


def doctor(
    run: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--run",
            help="Start a job that measures the hosts, as --preflight does, and show the result "
            "(default: no).",
        ),
    ] = False,
    as_json: Json = False,  # noqa: FBT002
    **flags: Any,
) -> int:
    """Check whether a cluster can run a job.

    The command takes the options of a job and, without --run, starts no job. The exit code is 1 if
    a check fails or a host is slow.
    """
    if run:
        from clusterjob.cli import preflight

        return preflight.measure_hosts(flags, as_json=as_json)
    from clusterjob.cli import output
    from clusterjob.core import job_settings, jobs
    from clusterjob.doctor.engine import CheckState

    directory = Path.cwd()
    cluster = flags.pop("cluster")
    settings = job_settings.resolve(flags_given(flags), cluster, directory=directory, executes=True)
    done = []
    for check in jobs.doctor_checks(settings, directory):
        done.append(check)
        if not as_json:
            output.print_check(check)
    bad = any(check.state is CheckState.FAILED for check in done)
    if as_json:
        output.print_json(
            {
                "cluster": settings.cluster,
                "backend": settings.backend,
                "fit": not bad,
                "checks": [vars(check) for check in done],
            }
        )
    return 1 if bad else 0
