"""The commands about hosts: hosts (are they fit), hosts trust (record a host's key)."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Cluster = Annotated[str | None, typer.Option("--cluster", metavar="NAME", help="A profile that says how hosts are reached.")]
Options = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the ssh cluster; repeatable.")]

_app = typer.Typer(name="hosts", help="Ask hosts whether they are fit for jobs; record their keys as trusted.", rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.add_typer(_app)


@_app.callback(invoke_without_command=True)
def show(
    ctx: typer.Context,
    hosts: Annotated[str | None, typer.Option("--hosts", metavar="LIST", help="The hosts: a,b[1-4],user@c:2222.")] = None,
    hostfile: Annotated[str | None, typer.Option("--hostfile", metavar="FILE", help="... from a file: a host a line.")] = None,
    cluster: Cluster = None,
    python: Annotated[str | None, typer.Option("--python", metavar="PATH", help="The interpreter there; default: python3.")] = None,
    options: Options = None,
    as_json: Json = False,  # noqa: FBT002
) -> int:
    """Ask hosts whether they are fit for jobs; ends with 1 if one is not.

    Reached, trusted, an interpreter that is new enough, torch, free disk, GPUs.
    """
    if ctx.invoked_subcommand is not None:
        return 0
    import os
    from pathlib import Path

    from clusterjob import output, survey

    settings = _settings(cluster, {"hosts": hosts, "hostfile": hostfile, "python": python, "set": options})
    reports = survey.survey(settings, survey.named_hosts(settings, os.environ, Path.cwd()))
    if as_json:
        output.print_json({"hosts": [vars(report) | {"gpus": list(report.gpus)} for report in reports]})
    else:
        output.print_hosts(reports)
    return 1 if any(report.trouble for report in reports) else 0


@_app.command("trust")
def trust(
    host: Annotated[list[str], typer.Argument(metavar="HOST...", help="Hosts, or lists of them.")],
    replace: Annotated[bool, typer.Option("--replace", help="Put the key in the place of another one that is known.")] = False,  # noqa: FBT002
    fingerprint: Annotated[
        str | None, typer.Option("--fingerprint", metavar="SHA256:...", help="Trust this key alone, as the host's owner told it.")
    ] = None,
    cluster: Cluster = None,
    options: Options = None,
) -> int:
    """Show the key of a host and record it as trusted.

    It goes into the first file of ssh's UserKnownHostsFile, so ssh trusts it too.
    """
    from clusterjob import output, survey
    from clusterjob.hosts import parse_hosts

    settings = _settings(cluster, {"set": options})
    for one in parse_hosts(",".join(host)):
        done = survey.trust(settings, one, replace=replace, expected=fingerprint)
        where = f"{'recorded' if done.news else 'known already'} in {done.path}" if done.path else "not remembered"
        output.say(f"{done.host}: {done.kind} {done.fingerprint}, {where}")
    return 0


def _settings(cluster: str | None, flags: dict[str, Any]) -> Any:
    import os
    from pathlib import Path

    from clusterjob import backends, config

    given = {key: value for key, value in flags.items() if value is not None and value != []}
    return config.resolve(given, cluster, os.environ, Path.cwd(), backends.names(), "ssh")
