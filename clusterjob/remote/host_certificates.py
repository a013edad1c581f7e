"""OpenSSH host certificates: parse and validate.

Source: PROTOCOL.certkeys of OpenSSH.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

SUFFIX = "-cert-v01@openssh.com"
_HOST = 2
# Number of the key's own fields, between the nonce and the serial number.
_KEY_FIELDS = {
    "ssh-ed25519": 1,
    "ecdsa-sha2-nistp256": 2,
    "ecdsa-sha2-nistp384": 2,
    "ecdsa-sha2-nistp521": 2,
    "ssh-rsa": 2,
}


@dataclass(frozen=True)
class Certificate:
    """A host certificate.

    Attributes:
        kind: the type of the host's key.
        key: the host's key in wire format, without the certificate.
        principals: the host names that it is valid for; empty for any.
        valid_after, valid_before: seconds since 1970.
        critical: whether it has critical options; none are defined for hosts.
        is_host: whether it is a host certificate, not a user certificate.
        authority: the key of the authority that signed it.
        signed, signature: the signed bytes, and the signature.
    """

    kind: str
    key: bytes
    principals: tuple[str, ...]
    valid_after: int
    valid_before: int
    critical: bool
    is_host: bool
    authority: bytes
    signed: bytes
    signature: bytes


class _Fields:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.offset = 0

    def take(self, size: int) -> bytes:
        taken = self._data[self.offset : self.offset + size]
        if len(taken) < size:
            raise ValueError("it ends too early")
        self.offset += size
        return taken

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def text(self) -> bytes:
        return self.take(self.number(4))


def parse(blob: bytes) -> Certificate:
    """Parse a certificate.

    Raises:
        ValueError: the bytes are not a certificate.
    """
    fields = _Fields(blob)
    kind = fields.text().decode(errors="replace").removesuffix(SUFFIX)
    if kind not in _KEY_FIELDS:
        raise ValueError(f"its type is {kind!r}")
    fields.text()  # the nonce
    begin = fields.offset
    for _ in range(_KEY_FIELDS[kind]):
        fields.text()
    name = kind.encode()
    key = len(name).to_bytes(4, "big") + name + blob[begin : fields.offset]
    fields.number(8)  # the serial number
    is_host = fields.number(4) == _HOST
    fields.text()  # the key's id
    names = _Fields(data := fields.text())
    principals = []
    while names.offset < len(data):
        principals.append(names.text().decode(errors="replace"))
    valid_after, valid_before = fields.number(8), fields.number(8)
    critical = bool(fields.text())
    fields.text()  # extensions
    fields.text()  # reserved
    authority = fields.text()
    signed = blob[: fields.offset]
    return Certificate(
        kind,
        key,
        principals=tuple(principals),
        valid_after=valid_after,
        valid_before=valid_before,
        critical=critical,
        is_host=is_host,
        authority=authority,
        signed=signed,
        signature=fields.text(),
    )


def objection(
    certificate: Certificate, host: str, verify: Callable[[bytes, bytes, bytes], bool]
) -> str:
    """Return why a certificate is not valid for a host; empty if it is valid.

    Args:
        certificate: the certificate that the host presents, signed by a trusted authority.
        host: the host's name, without a port.
        verify: returns whether (authority's key, signature, data) is a valid signature.
    """
    if not certificate.is_host:
        return "it is a user certificate"
    if certificate.critical:
        return "it has critical options, which are not supported"
    if not certificate.valid_after <= time.time() < certificate.valid_before:
        return "it is not valid now"
    if certificate.principals and host not in certificate.principals:
        return f"it is valid for {', '.join(certificate.principals[:5])}"
    if not verify(certificate.authority, certificate.signature, certificate.signed):
        return "its signature is wrong"
    return ""
