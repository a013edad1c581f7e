"""The commands about hosts: hosts (are they fit), hosts trust (record a host's key), fetch (results
from them).
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Cluster = Annotated[
    str | None,
    typer.Option("--cluster", metavar="NAME", help="A profile that says how hosts are reached."),
]
Options = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="An option of the ssh cluster; repeatable."),
]

_app = typer.Typer(
    name="hosts",
    help="Ask hosts whether they are fit for jobs; record their keys as trusted.",
    rich_markup_mode=None,
)


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.add_typer(_app)
    app.command("fetch")(fetch)


@_app.callback(invoke_without_command=True)
def show(
    ctx: typer.Context,
    hosts: Annotated[
        str | None, typer.Option("--hosts", metavar="LIST", help="The hosts: a,b[1-4],user@c:2222.")
    ] = None,
    hostfile: Annotated[
        str | None,
        typer.Option("--hostfile", metavar="FILE", help="... from a file: a host a line."),
    ] = None,
    cluster: Cluster = None,
    python: Annotated[
        str | None,
        typer.Option("--python", metavar="PATH", help="The interpreter there; default: python3."),
    ] = None,
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

    from clusterjob.backends.ssh import host_checks
    from clusterjob.cli import output

    settings = _settings(
        cluster, {"hosts": hosts, "hostfile": hostfile, "python": python, "set": options}
    )
    reports = host_checks.survey(
        settings, host_checks.named_hosts(settings, os.environ, directory=Path.cwd())
    )
    if as_json:
        output.print_json(
            {"hosts": [vars(report) | {"gpus": list(report.gpus)} for report in reports]}
        )
    else:
        output.print_hosts(reports)
    return 1 if any(report.error for report in reports) else 0


@_app.command("trust")
def trust(
    host: Annotated[list[str], typer.Argument(metavar="HOST...", help="Hosts, or lists of them.")],
    replace: Annotated[  # noqa: FBT002
        bool,
        typer.Option("--replace", help="Put the key in the place of another one that is known."),
    ] = False,
    fingerprint: Annotated[
        str | None,
        typer.Option(
            "--fingerprint",
            metavar="SHA256:...",
            help="Trust this key alone, as the host's owner told it.",
        ),
    ] = None,
    cluster: Cluster = None,
    options: Options = None,
) -> int:
    """Show the key of a host and record it as trusted.

    It goes into the first file of ssh's UserKnownHostsFile, so ssh trusts it too. Without a
    terminal --fingerprint is needed.
    """
    import sys

    from clusterjob.backends.ssh import host_checks
    from clusterjob.cli import output
    from clusterjob.core.hosts import parse_hosts

    settings = _settings(cluster, {"set": options})
    for one in parse_hosts(",".join(host)):
        done = host_checks.trust(
            settings, one, replace=replace, expected=fingerprint, compared=sys.stdin.isatty()
        )
        where = (
            f"{'recorded' if done.news else 'known already'} in {done.path}"
            if done.path
            else "not remembered"
        )
        output.say(f"{done.host}: {done.kind} {done.fingerprint}, {where}")
    return 0


def fetch(
    job_id: Annotated[str, typer.Argument(metavar="ID", help="A job id, or the beginning of one.")],
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH...]", help="Relative to the working directory; default: all."
        ),
    ] = None,
    to: Annotated[str, typer.Option("--to", metavar="DIR", help="Where to; default: here.")] = ".",
    node: Annotated[
        int | None, typer.Option("--node", min=0, metavar="N", help="From this node; default: 0.")
    ] = None,
    every: Annotated[  # noqa: FBT002
        bool, typer.Option("--all", help="From every host, each into DIR/node<k>.")
    ] = False,
    force: Annotated[  # noqa: FBT002
        bool, typer.Option("--force", help="Replace files that have changed here.")
    ] = False,
    max_files: Annotated[
        int,
        typer.Option(
            "--max-files",
            min=1,
            metavar="N",
            help="Most files that a host may send (default: 100000).",
        ),
    ] = 100_000,
    max_size: Annotated[
        str,
        typer.Option(
            "--max-size", metavar="SIZE", help="Most bytes that a host may send (default: 50G)."
        ),
    ] = "50G",
) -> int:
    """Bring results back from the hosts of a job: what has changed.

    Files that have changed here are not replaced without asking; ends with 1 if some were left.
    """
    from pathlib import Path

    from clusterjob.backends.base import FetchLimits
    from clusterjob.cli import output
    from clusterjob.core import jobs
    from clusterjob.core.records import Records
    from clusterjob.core.units import parse_size
    from clusterjob.errors import UsageError

    if every and node is not None:
        raise UsageError("there are both --all and --node", "one of them says from where")
    nodes = None if every else [node or 0]
    limits = FetchLimits(max_files, parse_size(max_size))
    done = jobs.fetch(
        Records().find(job_id),
        paths or ["."],
        target=Path(to),
        nodes=nodes,
        may_replace=lambda names: force or _agree(names),
        limits=limits,
    )
    for one in done:
        output.say(f"{one.host}: {len(one.written)} written, {one.unchanged} unchanged")
        for text in one.passed_over:
            output.say(f"{one.host}: passed over {text}")
        for path in one.kept:
            output.say(
                f"{one.host}: {path} has changed here, or is code that was sent, and was left (--force replaces it)"
            )
    return 1 if any(one.kept for one in done) else 0


def _agree(names: list[str]) -> bool:
    """Ask, on a terminal, whether files may be replaced."""
    import sys

    if not sys.stdin.isatty():
        return False
    from clusterjob.node.system.sanitize import sanitize

    shown = ", ".join(map(sanitize, names[:5])) + (
        f" and {len(names) - 5} more" if len(names) > 5 else ""
    )
    return typer.confirm(
        f"{shown}: changed here, or code that was sent. Replace by the host's?", err=True
    )


def _settings(cluster: str | None, flags: dict[str, Any]) -> Any:
    import os
    from pathlib import Path

    from clusterjob.backends import base
    from clusterjob.core import config
    from clusterjob.core.trust import Use

    given = {key: value for key, value in flags.items() if value is not None and value != []}
    return config.resolve(
        given,
        cluster,
        environ=os.environ,
        directory=Path.cwd(),
        backends=base.names(),
        fallback=lambda: "ssh",
        use=Use(),
    )
