"""Check a host key against the files of RevokedHostKeys.

A file is a list of public keys, or an OpenSSH key revocation list (KRL). As in ssh, a file that
cannot be read refuses every host. Source: ssh_config(5), RevokedHostKeys; ssh-keygen(1), "KEY
REVOCATION LISTS".
"""

from __future__ import annotations

import base64
import binascii
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

_KRL = b"SSHKRL\n\0"
_TIMEOUT = 20.0  # seconds for ssh-keygen


def objection(paths: Iterable[Path], kind: str, shown: bytes, related: Sequence[bytes]) -> str:
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
            why = _objection_of_krl(path, kind, shown=shown)
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


def _objection_of_krl(path: Path, kind: str, shown: bytes) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".pub") as stream:
        stream.write(f"{kind} {base64.b64encode(shown).decode()}\n")
        stream.flush()
        try:
            asked = subprocess.run(
                ["ssh-keygen", "-Q", "-f", str(path), stream.name], capture_output=True,
                stdin=subprocess.DEVNULL, timeout=_TIMEOUT, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return f"ssh-keygen cannot be run to check the revoked keys in {path}"
    if asked.returncode == 0:
        return ""
    return (
        f"its key is revoked ({path})"
        if asked.returncode == 1
        else f"ssh-keygen cannot read the revoked keys in {path}"
    )
