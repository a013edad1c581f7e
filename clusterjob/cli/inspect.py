"""The commands that show what clusterjob sees: env (this process's place in a job), config (settings and where they come from)."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("env")(env)
    app.command("config")(config)


def env(as_json: Json = False) -> int:  # noqa: FBT002
    """Show the place in a job that is found here, and why.

    Which variable gave which field, what was ignored, what conflicts; exit code 1 if something does.
    """
    import os

    from clusterjob import output
    from clusterjob.node import environments
    from clusterjob.node.environments.describe import describe

    found = describe(environments.detect(os.environ))
    if as_json:
        output.print_json(found)
    else:
        output.print_environment(found)
    return 1 if found["conflicts"] else 0


def config(
    cluster: Annotated[str | None, typer.Option("--cluster", metavar="NAME", help="The profile, or backend, to show.")] = None,
    as_json: Json = False,  # noqa: FBT002
) -> int:
    """Show the settings that hold here, and where each was set."""
    import os
    from pathlib import Path

    from clusterjob import backends, output
    from clusterjob.config import resolve

    settings = resolve({}, cluster, os.environ, Path.cwd(), backends.names(), backends.preferred())
    if as_json:
        output.print_json(output.settings_json(settings))
    else:
        output.print_settings(settings)
    return 0
