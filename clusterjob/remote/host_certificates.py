"""Host certificates: what an authority says of a host's key, and whether that holds.

Source: PROTOCOL.certkeys of OpenSSH.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

SUFFIX = "-cert-v01@openssh.com"
_HOST = 2
# How many fields of the key itself stand between the nonce and the serial number.
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
        kind: the type of the host's own key.
        key: that key as it travels without a certificate.
        principals: the names that it is good for; none for any.
        valid_after, valid_before: seconds since 1970.
        critical: whether it holds conditions that have to be understood; a host's may hold none.
        is_host: whether it is a host's, not a user's.
        authority: the key of the authority that signed it.
        signed, signature: what was signed, and the signature.
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

    def number(self, size: int) -> int:
        if self.offset + size > len(self._data):
            raise ValueError("it ends too early")
        value = int.from_bytes(self._data[self.offset : self.offset + size], "big")
        self.offset += size
        return value

    def text(self) -> bytes:
        size = self.number(4)
        if self.offset + size > len(self._data):
            raise ValueError("it ends too early")
        self.offset += size
        return self._data[self.offset - size : self.offset]


def parse(blob: bytes) -> Certificate:
    """Return a certificate from its bytes.

    Raises:
        ValueError: it is none.
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
    """Return why a certificate does not vouch for a host; empty if it does.

    Args:
        certificate: what the host has shown; that its authority is trusted has been seen already.
        host: the host's name, without a port.
        verify: whether (authority's key, signature, data) belong together.
    """
    if not certificate.is_host:
        return "it is a user's certificate"
    if certificate.critical:
        return "it holds conditions that are not understood"
    if not certificate.valid_after <= time.time() < certificate.valid_before:
        return "it is not valid now"
    if certificate.principals and host not in certificate.principals:
        return f"it is good for {', '.join(certificate.principals[:5])}"
    if not verify(certificate.authority, certificate.signature, certificate.signed):
        return "its signature is wrong"
    return ""
