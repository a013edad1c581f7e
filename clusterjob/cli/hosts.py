"""The commands `hosts` (host checks), `hosts bad`, `hosts trust` and `fetch` (results)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from clusterjob.cli.help import App, Group
from clusterjob.cli.job_options import Id, Json, flags_given
from clusterjob.errors import UsageError

Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster", metavar="NAME", help="Profile with the connection settings (default: ssh)."
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Option of the ssh backend; repeatable (default: none)."
    ),
]

app = App(
    name="hosts",
    cls=Group,
    help="Check that hosts can run jobs; record host keys as trusted; list hosts that failed.",
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def show(
    ctx: typer.Context,
    hosts: Annotated[
        str | None,
        typer.Option(
            "--hosts",
            metavar="LIST",
            help="Hosts to check: a,b[1-4],user@c:2222 (default: --hostfile or the configuration).",
        ),
    ] = None,
    hostfile: Annotated[
        str | None,
        typer.Option(
            "--hostfile", metavar="FILE", help="File with one host per line (default: none)."
        ),
    ] = None,
    cluster: Cluster = None,
    python: Annotated[
        str | None,
        typer.Option(
            "--python", metavar="PATH", help="Python interpreter on the hosts (default: python3)."
        ),
    ] = None,
    options: Options = None,
    as_json: Json = False,  # noqa: FBT002
) -> int:
    """Check that hosts can run jobs; the exit code is 1 if a check fails.

    The checks are: connection, host key, interpreter version, torch, free disk space and GPUs.
    """
    if ctx.invoked_subcommand is not None:
        return 0
    from clusterjob.backends.ssh import host_checks
    from clusterjob.cli import output

    settings = settings_of(
        cluster, {"hosts": hosts, "hostfile": hostfile, "python": python, "set": options}
    )
    reports = host_checks.check_hosts(
        settings, host_checks.named_hosts(settings, os.environ, directory=Path.cwd())
    )
    if as_json:
        output.print_json(
            {"hosts": [vars(report) | {"gpus": list(report.gpus)} for report in reports]}
        )
    else:
        output.print_hosts(reports)
    return 1 if any(report.error for report in reports) else 0


@app.command()
def bad(
    clear: Annotated[  # noqa: FBT002
        bool,
        typer.Option("--clear", help="Forget HOST, or all of them (default: list them)."),
    ] = False,
    host: Annotated[
        str | None, typer.Argument(metavar="[HOST]", help="A host to forget (default: all).")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="NAME", help="Profile or backend (default: all)."),
    ] = None,
    as_json: Json = False,  # noqa: FBT002
) -> int:
    """List the hosts that jobs blamed for a failure in the last 24 hours.

    Later jobs avoid them for a day, if there are enough other hosts.
    """
    from clusterjob.cli import output
    from clusterjob.core import bad_hosts

    if host is not None and not clear:
        raise UsageError("HOST is given without --clear", f"clusterjob hosts bad --clear {host}")
    known = [one for one in bad_hosts.clusters() if cluster in (None, one.cluster)]
    if clear:
        count = sum(one.clear(host) for one in known)
        output.print_message(f"{count} host{'s' * (count != 1)} forgotten")
        return 0
    rows = [(one.cluster, each) for one in known for each in one.listed()]
    if as_json:
        output.print_json({"hosts": [vars(each) | {"cluster": name} for name, each in rows]})
    elif rows:
        output.print_bad_hosts(rows)
    else:
        output.print_message("no job has blamed a host in the last 24 hours")
    return 0


@app.command()
def trust(
    host: Annotated[list[str], typer.Argument(metavar="HOST...", help="Hosts or host lists.")],
    replace: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--replace", help="Replace a different key that is already recorded (default: no)."
        ),
    ] = False,
    fingerprint: Annotated[
        str | None,
        typer.Option(
            "--fingerprint",
            metavar="SHA256:...",
            help="Expected fingerprint from the host's owner (default: ask on the terminal).",
        ),
    ] = None,
    cluster: Cluster = None,
    options: Options = None,
) -> int:
    """Show the key of a host and record it as trusted.

    The key is added to the first file of ssh's UserKnownHostsFile, so ssh trusts it too. Without a
    terminal, --fingerprint is required.
    """
    from clusterjob.backends.ssh import host_checks
    from clusterjob.cli import output
    from clusterjob.core.hosts import parse_hosts

    settings = settings_of(cluster, {"set": options})
    for one in parse_hosts(",".join(host)):
        done = host_checks.trust(
            settings, one, replace=replace, expected=fingerprint, compared=sys.stdin.isatty()
        )
        where = (
            f"{'recorded' if done.news else 'already recorded'} in {done.path}"
            if done.path
            else "not recorded"
        )
        output.print_message(f"{done.host}: {done.kind} {done.fingerprint}, {where}")
    return 0


def fetch(
    job_id: Id,
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH...]", help="Paths relative to the working directory (default: all)."
        ),
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="DIR", help="Target directory (default: the current directory)."
        ),
    ] = ".",
    node: Annotated[
        int | None,
        typer.Option("--node", min=0, metavar="N", help="Node to fetch from (default: 0)."),
    ] = None,
    every: Annotated[  # noqa: FBT002
        bool, typer.Option("--all", help="All hosts, each into DIR/node<k> (default: node 0 only).")
    ] = False,
    force: Annotated[  # noqa: FBT002
        bool, typer.Option("--force", help="Replace files that have changed here (default: ask).")
    ] = False,
    max_files: Annotated[
        int,
        typer.Option(
            "--max-files",
            min=1,
            metavar="N",
            help="Maximum number of files per host (default: 100000).",
        ),
    ] = 100_000,
    max_size: Annotated[
        str,
        typer.Option(
            "--max-size", metavar="SIZE", help="Maximum number of bytes per host (default: 50G)."
        ),
    ] = "50G",
) -> int:
    """Fetch changed result files from the hosts of a job.

    Files that have changed on this machine are replaced only after a confirmation or with --force.
    The exit code is 1 if some files were not replaced.
    """
    from clusterjob.backends.base import FetchLimits
    from clusterjob.cli import output
    from clusterjob.core import jobs
    from clusterjob.core.records import Records
    from clusterjob.core.units import parse_size

    if every and node is not None:
        raise UsageError("--all and --node are both given", "give only one of them")
    done = jobs.fetch(
        Records().find(job_id),
        paths or ["."],
        target=Path(to),
        nodes=None if every else [node or 0],
        may_replace=lambda names: force or _agree(names),
        limits=FetchLimits(max_files, parse_size(max_size)),
    )
    for one in done:
        output.print_message(f"{one.host}: {len(one.written)} written, {one.unchanged} unchanged")
        for text in one.passed_over:
            output.print_message(f"{one.host}: skipped {text}")
        for path in one.kept:
            output.print_message(
                f"{one.host}: {path} not replaced: it has changed here or is code that was sent"
                " (--force replaces it)"
            )
    return 1 if any(one.kept for one in done) else 0


def _agree(names: list[str]) -> bool:
    """Ask on the terminal whether to replace files; return False without a terminal."""
    if not sys.stdin.isatty():
        return False
    from clusterjob.node.system.sanitize import sanitize

    shown = ", ".join(map(sanitize, names[:5])) + (
        f" and {len(names) - 5} more" if len(names) > 5 else ""
    )
    return typer.confirm(
        f"{shown}: changed on this machine, or sent as code. Replace with the host's version?",
        err=True,
    )


def settings_of(cluster: str | None, flags: dict[str, Any]) -> Any:
    """Return the settings of a profile and of flags."""
    from clusterjob.backends import base
    from clusterjob.core import config

    return config.resolve(
        flags_given(flags),
        cluster,
        environ=os.environ,
        directory=Path.cwd(),
        backends=base.names(),
        fallback=lambda: "ssh",
        executes=True,
    )
