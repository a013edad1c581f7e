"""Trust in host keys: known_hosts, certificates, RevokedHostKeys and StrictHostKeyChecking.

A file of RevokedHostKeys is a list of public keys, or an OpenSSH key revocation list (KRL). As in
ssh, every host is refused if a file cannot be read. Source: ssh_config(5), RevokedHostKeys;
ssh-keygen(1), "KEY REVOCATION LISTS".
"""

from __future__ import annotations

import base64
import binascii
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import paramiko
from paramiko.message import Message

from clusterjob.errors import HostError
from clusterjob.remote import host_certificates, known_hosts
from clusterjob.remote.known_hosts import HostKeyStatus, KnownHosts, fingerprint
from clusterjob.remote.ssh_config import Target

_KRL = b"SSHKRL\n\0"
_TIMEOUT = 20.0  # seconds for ssh-keygen
_HINT = "this host is not to be trusted"


@dataclass(frozen=True)
class HostKey:
    """The key that a host presents.

    Attributes:
        kind: its type.
        blob: its bytes in wire format.
        certificate: its certificate; None if it has none.
        shown: the bytes of the certificate; empty without one.
    """

    kind: str
    blob: bytes
    certificate: host_certificates.Certificate | None = None
    shown: bytes = b""


def known_keys(target: Target) -> KnownHosts:
    """Return the keys in a host's known_hosts files."""
    return KnownHosts((*target.known_hosts, *target.system_known_hosts))


def lookup_names(target: Target) -> list[str]:
    """Return the names to look up a host's key by; see `known_hosts.lookup_names`."""
    return known_hosts.lookup_names(target.hostname, target.port, alias=target.key_alias)


def types_to_request(target: Target, supported: Iterable[str]) -> tuple[str, ...]:
    """Return the host key types to request.

    Certificates come first if known_hosts has an authority for the host, then the types of known
    keys, then the others.
    """
    known, names = known_keys(target), lookup_names(target)
    plain = [kind for kind in supported if not kind.endswith(host_certificates.SUFFIX)]
    kinds = set(known.kinds(names))
    wanted = [kind for kind in plain if ("ssh-rsa" if kind.startswith("rsa-") else kind) in kinds]
    certificates = [f"{kind}{host_certificates.SUFFIX}" for kind in plain]
    return (
        *(certificates if known.authorities(names) else ()),
        *wanted,
        *(kind for kind in plain if kind not in wanted),
    )


def verify(target: Target, key: HostKey, warn: Callable[[str], None]) -> None:
    """Check a host key against RevokedHostKeys, known_hosts and StrictHostKeyChecking.

    Args:
        target: the host, with the paths of these files.
        key: the key that the host presents.
        warn: called with a line about a key that is used although it is not trusted.

    Raises:
        HostError: the key is not trusted.
    """
    refuse_revoked(target, key)
    known, names = known_keys(target), lookup_names(target)
    if key.certificate is not None:
        authority = key.certificate.authority
        if place := known.revoked(names, authority):
            raise HostError(
                target.label,
                f"the authority that signed its key is revoked ({place})",
                hint=_HINT,
            )
        if authority in known.authorities(names):
            why = host_certificates.objection(
                key.certificate, (target.key_alias or target.hostname).lower(), verify=_signed_by
            )
            if why:
                raise HostError(target.label, f"the certificate of its key is not valid: {why}")
            if place := known.revoked(names, key.blob):
                raise HostError(
                    target.label,
                    f"its key is revoked ({place})",
                    hint=_HINT,
                )
            return
    status, place = known.status(names, key.blob)
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


def refuse_revoked(target: Target, key: HostKey) -> None:
    """Refuse a host key that RevokedHostKeys revokes.

    Raises:
        HostError: the key is revoked, or a file of RevokedHostKeys cannot be read.
    """
    if key.certificate is None:
        why = _revocation(target.revoked_keys, key.kind, shown=key.blob, related=())
    else:
        kind = f"{key.kind}{host_certificates.SUFFIX}"
        why = _revocation(
            target.revoked_keys,
            kind,
            shown=key.shown,
            related=(key.blob, key.certificate.authority),
        )
    if why:
        raise HostError(
            target.label, why, hint="RevokedHostKeys of the ssh configuration names the file"
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


def _signed_by(authority: bytes, signature: bytes, data: bytes) -> bool:
    try:
        kind = Message(authority).get_text()
        key = paramiko.PKey.from_type_string(key_type=kind, key_bytes=authority)
        return bool(key.verify_ssh_sig(data, Message(signature)))
    except (paramiko.SSHException, ValueError):
        return False


def _revocation(paths: Iterable[Path], kind: str, shown: bytes, related: Sequence[bytes]) -> str:
    """Return why a key is refused; empty if no file revokes it.

    Args:
        paths: the files.
        kind: the type of the key or of its certificate.
        shown: the key or the certificate that the host presents.
        related: for a certificate, its key and the key of its authority.
    """
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as error:
            return f"the file of revoked keys {path} cannot be read: {error.strerror}"
        if content.startswith(_KRL):
            why = _revocation_by_krl(path, kind, shown=shown)
        else:
            listed = {blob for line in content.splitlines() if (blob := _blob(line))}
            why = f"its key is revoked ({path})" if listed & {shown, *related} else ""
        if why:
            return why
    return ""


def _blob(line: bytes) -> bytes | None:
    words = line.split()
    if len(words) < 2 or words[0].startswith(b"#"):
        return None
    try:
        return base64.b64decode(words[1], validate=True)
    except (ValueError, binascii.Error):
        return None


def _revocation_by_krl(path: Path, kind: str, shown: bytes) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".pub") as stream:
        stream.write(f"{kind} {base64.b64encode(shown).decode()}\n")
        stream.flush()
        try:
            asked = subprocess.run(
                ["ssh-keygen", "-Q", "-f", str(path), stream.name],
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=_TIMEOUT,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return f"ssh-keygen cannot be run to check the revoked keys in {path}"
    if asked.returncode == 0:
        return ""
    return (
        f"its key is revoked ({path})"
        if asked.returncode == 1
        else f"ssh-keygen cannot read the revoked keys in {path}"
    )
