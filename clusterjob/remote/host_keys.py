"""Trust in host keys: known_hosts and StrictHostKeyChecking, for connections with paramiko."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from clusterjob.errors import HostError
from clusterjob.remote import known_hosts
from clusterjob.remote.known_hosts import HostKeyStatus, KnownHosts, fingerprint
from clusterjob.remote.ssh_config import Target

_HINT = "this host is not to be trusted"


@dataclass(frozen=True)
class HostKey:
    """The key that a host presents.

    Attributes:
        kind: its type.
        blob: its bytes in wire format.
    """

    kind: str
    blob: bytes


def known_keys(target: Target) -> KnownHosts:
    """Return the keys in a host's known_hosts files."""
    return KnownHosts((*target.known_hosts, *target.system_known_hosts))


def lookup_names(target: Target) -> list[str]:
    """Return the names to look up a host's key by; see `known_hosts.lookup_names`."""
    return known_hosts.lookup_names(target.hostname, target.port, alias=target.key_alias)


def types_to_request(target: Target, supported: Iterable[str]) -> tuple[str, ...]:
    """Return the host key types to request: first the types of known keys, then the others.

    Certificates are left to OpenSSH.
    """
    kinds = set(known_keys(target).kinds(lookup_names(target)))
    plain = [kind for kind in supported if not kind.endswith("-cert-v01@openssh.com")]
    wanted = [kind for kind in plain if ("ssh-rsa" if kind.startswith("rsa-") else kind) in kinds]
    return (*wanted, *(kind for kind in plain if kind not in wanted))


def verify(target: Target, key: HostKey, warn: Callable[[str], None]) -> None:
    """Check a host key against known_hosts and StrictHostKeyChecking.

    Args:
        target: the host, with the paths of these files.
        key: the key that the host presents.
        warn: called with a line about a key that is used although it is not trusted.

    Raises:
        HostError: the key is not trusted.
    """
    status, place = known_keys(target).status(lookup_names(target), key.blob)
    if status is HostKeyStatus.KNOWN:
        return
    shown = f"{key.kind} {fingerprint(key.blob)}"
    if status is HostKeyStatus.REVOKED:
        raise HostError(
            target.label,
            f"its key {shown} is revoked ({place})",
            hint=_HINT,
        )
    trust = f"clusterjob hosts trust {target.label}"
    if target.strict == "no":
        what = (
            "is unknown" if status is HostKeyStatus.UNKNOWN else f"differs from the one in {place}"
        )
        warn(f"{target.label}: its key {shown} {what}; used because StrictHostKeyChecking is `no`")
        if status is HostKeyStatus.UNKNOWN:
            remember(target, key)
        return
    if status is HostKeyStatus.CHANGED:
        raise HostError(
            target.label,
            f"its key has changed: it shows {shown}, another one is in {place}",
            hint=f"if the change is intended: {trust} --replace",
        )
    if target.strict == "accept-new":
        remember(target, key)
        return
    raise HostError(
        target.label,
        f"its key is unknown: {shown}",
        hint=f"compare it with the key on the host, then: {trust}",
    )


def remember(target: Target, key: HostKey) -> Path | None:
    """Record a host key in the user's first known_hosts file.

    Returns:
        The file; None if UserKnownHostsFile is `none`.

    Raises:
        HostError: the file cannot be written.
    """
    if not target.known_hosts:
        return None
    path = target.known_hosts[0]
    name = lookup_names(target)[0]
    try:
        known_hosts.record(path, name, kind=key.kind, blob=key.blob, hashed=target.hash_names)
    except OSError as error:
        raise HostError(
            target.label, f"its key cannot be recorded in {path}: {error.strerror}"
        ) from error
    return path
