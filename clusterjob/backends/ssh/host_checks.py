"""Check hosts without a job, and record a host's key as trusted (`clusterjob hosts`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from clusterjob.backends import shared
from clusterjob.core import config, hosts
from clusterjob.core.hosts import Host
from clusterjob.errors import HostError, SpecError

if TYPE_CHECKING:
    from clusterjob.remote.host_probe import HostReport
    from clusterjob.remote.sessions import Place
    from clusterjob.remote.transport import ConnectOptions


def check_hosts(settings: config.Settings, named: tuple[Host, ...]) -> list[HostReport]:
    """Check in parallel whether hosts are fit to run jobs.

    Args:
        settings: the interpreter, the setup lines and the options of the cluster.
        named: the hosts.
    """
    from clusterjob.remote import host_probe

    sessions = shared.new_sessions()
    try:
        return host_probe.probe_hosts(sessions, _place(settings, named))
    finally:
        sessions.close()


def named_hosts(
    settings: config.Settings, environ: Mapping[str, str], directory: Path
) -> tuple[Host, ...]:
    """Return the hosts of the settings, else the hosts of a platform's variables.

    Raises:
        SpecError: there are no hosts.
    """
    values = settings.values
    found = hosts.named_hosts(
        values.get("hosts"), values.get("hostfile"), directory=directory
    ) or hosts.of_platform(environ)
    if not found:
        raise SpecError(
            "there are no hosts",
            "set --hosts a,b[1-4] or --hostfile FILE, or use a profile with hosts",
        )
    return found


@dataclass(frozen=True)
class Trusted:
    """The result of `trust`.

    Attributes:
        host: the host as the user wrote it.
        kind, fingerprint: type and fingerprint of its key.
        path: the file with the key; None if no key is stored (UserKnownHostsFile none).
        news: True if this call added the key to the file.
    """

    host: str
    kind: str
    fingerprint: str
    path: str | None
    news: bool


def trust(
    settings: config.Settings, host: Host, *, replace: bool, expected: str | None, compared: bool
) -> Trusted:
    """Record a host's key as trusted.

    Args:
        settings: the options of the cluster.
        host: the host.
        replace: whether this key may replace another known key of the host.
        expected: the required fingerprint; None for any.
        compared: whether a user compares the fingerprint on a terminal. If not, a new key is
            recorded only if its fingerprint is `expected`.

    Raises:
        HostError: the host is unreachable, its key is revoked or is not the expected key, another
            key of the host is known, or no user has compared the key.
    """
    from clusterjob.remote import connect, host_keys, known_hosts
    from clusterjob.remote.known_hosts import HostKeyStatus
    from clusterjob.remote.pool import Pool

    pool = Pool(connection_options(settings, host))
    try:
        target = pool.resolve(host)
        key = connect.host_key(target, pool.options, through=partial(pool.through, target))
    finally:
        pool.close()
    shown = known_hosts.fingerprint(key.blob)
    named = f"its key is {key.kind} {shown}"
    if expected is not None and expected.removeprefix("SHA256:").rstrip("=") != shown.removeprefix(
        "SHA256:"
    ):
        raise HostError(
            str(host),
            f"{named}, not {expected}",
            hint="this may be another machine; do not trust it",
        )
    names = host_keys.lookup_names(target)
    key_status, location = host_keys.known_keys(target).status(names, key.blob)
    if key_status is HostKeyStatus.REVOKED:
        raise HostError(
            str(host),
            f"its key {key.kind} {shown} is revoked ({location})",
            hint="do not trust this host",
        )
    if key_status is HostKeyStatus.CHANGED and not replace:
        raise HostError(
            str(host),
            f"{named}, and another key is known ({location})",
            hint="if the owner of the host has changed the key, add --replace",
        )
    if key_status is HostKeyStatus.KNOWN:
        return Trusted(
            str(host), key.kind, fingerprint=shown, path=location.rpartition(":")[0], news=False
        )
    if expected is None and not compared:
        raise HostError(
            str(host),
            f"{named}, and there is no terminal to compare it on",
            hint=f"`clusterjob hosts trust {host} --fingerprint SHA256:...` with the fingerprint "
            "from the host's owner",
        )
    if key_status is HostKeyStatus.CHANGED:
        for file in target.known_hosts:
            try:
                known_hosts.forget(file, names)
            except OSError as error:
                raise HostError(str(host), f"{file} cannot be written: {error.strerror}") from error
    path = host_keys.remember(target, key)
    return Trusted(
        str(host), key.kind, fingerprint=shown, path=str(path) if path else None, news=True
    )


def connection_options(settings: config.Settings, host: Host) -> ConnectOptions:
    """Return the options of connections to a host."""
    return _place(settings, (host,)).connect_options(shared.warn)


def _place(settings: config.Settings, named: tuple[Host, ...]) -> Place:
    from clusterjob.backends.ssh import planning
    from clusterjob.remote import ssh_options

    values = settings.values
    given = values.get("set", {}) | {key: values[key] for key in ("transport",) if key in values}
    options = ssh_options.ConnectionSettings.of(given)
    if settings.backend == planning.NAME:  # another backend has options that ssh does not know
        options = planning.SshOptions.of(given).ssh
    return options.place(named, values.get("python", "python3"), values.get("setup", ()))
