"""Hosts before there is a job: are they reached, trusted and fit; and recording a host's key as
trusted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterjob.core import config, hosts, node_zip
from clusterjob.core.hosts import Host
from clusterjob.errors import HostError, SpecError
from clusterjob.node.system.sanitize import sanitize

if TYPE_CHECKING:
    from clusterjob.remote.host_probe import HostReport


def survey(settings: config.Settings, named: tuple[Host, ...]) -> list[HostReport]:
    """Ask hosts, all at once, whether they are fit for jobs.

    Args:
        settings: the interpreter, the setup lines and the options of the cluster.
        named: the hosts.
    """
    from clusterjob.remote import host_probe as room
    from clusterjob.remote.sessions import Visits

    visits = Visits(_warn, lambda: node_zip.node_zip(node_zip.cache_directory()))
    try:
        return room.survey(visits, _place(settings, named))
    finally:
        visits.close()


def named_hosts(
    settings: config.Settings, environ: Mapping[str, str], directory: Path
) -> tuple[Host, ...]:
    """Return the hosts that the settings, or else a platform, name.

    Raises:
        SpecError: there are none.
    """
    values = settings.values
    found = hosts.named_hosts(
        values.get("hosts"), values.get("hostfile"), directory=directory
    ) or hosts.of_platform(environ)
    if not found:
        raise SpecError(
            "there are no hosts", "--hosts a,b[1-4] or --hostfile FILE names them; so can a profile"
        )
    return found


@dataclass(frozen=True)
class Trusted:
    """What came of trusting a host.

    Attributes:
        host: as it was written.
        kind, fingerprint: its key.
        path: the file that has it; None if nothing is remembered (UserKnownHostsFile none).
        news: whether it was written there just now.
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
        replace: whether another key that is known may be replaced.
        expected: the fingerprint that it has to have; None for any.
        compared: whether somebody sees the fingerprint; without, a new key is recorded only if it
            is the expected one.

    Raises:
        HostError: it is not reached, its key is revoked or not the expected one, another one is
            known, or nobody has compared it.
    """
    from clusterjob.remote import connect, known_hosts
    from clusterjob.remote.known_hosts import KnownHosts, Standing
    from clusterjob.remote.pool import Pool

    place = _place(settings, (host,))
    pool = Pool(connect.ConnectOptions(place.timeout, _warn, ssh_config=place.ssh_config))
    try:
        target = pool.resolve(host)
        key = connect.host_key(target, pool.options, through=pool.through(target))
    finally:
        pool.close()
    connect.refuse_revoked(target, key)
    shown = known_hosts.fingerprint(key.blob)
    if expected is not None and expected.removeprefix("SHA256:").rstrip("=") != shown.removeprefix(
        "SHA256:"
    ):
        raise HostError(
            str(host),
            f"its key is {key.kind} {shown}, not {expected}",
            hint="this may be another machine: do not trust it",
        )
    names = known_hosts.lookup_names(target.hostname, target.port, alias=target.key_alias)
    standing, place_of_it = KnownHosts((*target.known_hosts, *target.system_known_hosts)).standing(
        names, key.blob
    )
    if standing is Standing.REVOKED:
        raise HostError(
            str(host),
            f"its key {key.kind} {shown} is revoked ({place_of_it})",
            hint="this host is not to be trusted",
        )
    if standing is Standing.CHANGED and not replace:
        why = f"its key is {key.kind} {shown}, and another one is known ({place_of_it})"
        raise HostError(
            str(host), why, hint="--replace puts this one in its place, if that is meant"
        )
    if standing is Standing.KNOWN:
        return Trusted(
            str(host), key.kind, fingerprint=shown, path=place_of_it.rpartition(":")[0], news=False
        )
    if expected is None and not compared:
        why = f"its key is {key.kind} {shown}, and without a terminal nobody compares it with the host's own"
        raise HostError(
            str(host),
            why,
            hint=f"`clusterjob hosts trust {host} --fingerprint SHA256:...` with what the host's owner says",
        )
    if standing is Standing.CHANGED:
        for file in target.known_hosts:
            try:
                known_hosts.forget(file, names)
            except OSError as error:
                raise HostError(str(host), f"{file} cannot be written: {error.strerror}") from error
    path = connect.remember(target, key)
    return Trusted(
        str(host), key.kind, fingerprint=shown, path=str(path) if path else None, news=True
    )


def _place(settings: config.Settings, named: tuple[Host, ...]) -> Any:
    from clusterjob.backends.ssh import planning
    from clusterjob.remote import ssh_options

    values = settings.values
    given = values.get("set", {})
    # A profile of another backend has options of its own beside those of its login host.
    options = (
        planning.Options.of(given).ssh
        if settings.backend == planning.NAME
        else ssh_options.Options.of(given)
    )
    return options.place(named, values.get("python", "python3"), values.get("setup", ()))


def _warn(text: str) -> None:
    logging.getLogger("clusterjob").warning("clusterjob: %s", sanitize(text))
