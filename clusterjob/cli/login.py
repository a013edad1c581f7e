"""The commands `login` and `logout`: one shared SSH connection, so that a host asks once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from clusterjob.cli.hosts import Cluster, Options, settings_of
from clusterjob.errors import UsageError

if TYPE_CHECKING:
    from clusterjob.remote.ssh_config import Target
    from clusterjob.remote.transport import Connection, ConnectOptions

Host = Annotated[
    str, typer.Argument(metavar="HOST", help="Host: user@host:port, or an alias of ssh.")
]


def login(host: Host, cluster: Cluster = None, options: Options = None) -> int:
    """Log in to a host once; later commands share the connection (OpenSSH's ControlMaster).

    ssh asks on the terminal for what the host requires: a password, a code, a passphrase, a touch
    of a FIDO key. The connection is open until `clusterjob logout`, or 8 hours without use.
    """
    from clusterjob.cli import output
    from clusterjob.remote import control_master, openssh_transport, terminal_prompt

    target, connect_options = _target(host, cluster, options)
    if control_master.find(target) is not None:
        output.print_message(f"{target.label}: already logged in as {target.user}")
        return 0
    openssh_transport.log_in(
        target,
        connect_options,
        terminal=terminal_prompt.available(),
        bastion=_bastion(target, connect_options),
    )
    output.print_message(
        f"{target.label}: logged in as {target.user}; `clusterjob logout {target.label}` ends it"
    )
    return 0


def logout(host: Host, cluster: Cluster = None, options: Options = None) -> int:
    """Close the connection that `clusterjob login` opened; commands that use it fail."""
    from clusterjob.cli import output
    from clusterjob.remote import control_master

    target, _ = _target(host, cluster, options)
    path = control_master.find(target)
    if path is None:
        output.print_message(f"{target.label}: not logged in")
        return 0
    control_master.close(path)
    output.print_message(f"{target.label}: logged out")
    return 0


def _bastion(target: Target, connect_options: ConnectOptions) -> Connection | None:
    """Return the shared connection to the last bastion before a host; None if there is none."""
    from clusterjob.remote import control_master, openssh_transport, ssh_config

    if not target.jumps:
        return None
    jump = ssh_config.resolve(target.jumps[-1], connect_options.ssh_config)
    path = control_master.find(jump)
    return openssh_transport.share(jump, connect_options, path) if path else None


def _target(
    host: str, cluster: str | None, options: list[str] | None
) -> tuple[Target, ConnectOptions]:
    """Return a host's ssh configuration, and the options of connections to it."""
    import shutil

    from clusterjob.backends.ssh import host_checks
    from clusterjob.core.hosts import parse_hosts
    from clusterjob.remote import ssh_config

    found = parse_hosts(host)
    if len(found) != 1:
        raise UsageError(f"{host!r} names {len(found)} hosts", "name one host")
    if shutil.which("ssh") is None:
        raise UsageError("the command ssh is not installed", "install openssh-client")
    connect_options = host_checks.connection_options(
        settings_of(cluster, {"set": options}), found[0]
    )
    return ssh_config.resolve(found[0], connect_options.ssh_config), connect_options
