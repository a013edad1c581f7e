"""Read and write known_hosts files as ssh does.

A malformed line is ignored, as in ssh; @revoked and @cert-authority lines are obeyed.
Source: sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT".
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import fnmatch
import functools
import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from clusterjob.node.system import files, private_dirs

CERT_AUTHORITY, REVOKED = "@cert-authority", "@revoked"


class HostKeyStatus(Enum):
    """Status of a host key in the known_hosts files."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"


@dataclass(frozen=True)
class KnownHostsEntry:
    """One line of a known_hosts file, with its file name and line number."""

    marker: str
    patterns: str
    kind: str
    blob: bytes
    place: str

    def names(self, host: str) -> bool:
        """Return whether the line applies to a host name from `lookup_names`."""
        found = False
        for pattern in self.patterns.split(","):
            if pattern.startswith("|1|"):
                found = found or _is_hash_of(pattern, host)
            elif pattern.startswith("!"):
                if _matches(pattern[1:], host):
                    return False
            else:
                found = found or _matches(pattern, host)
        return found


def _matches(pattern: str, host: str) -> bool:
    # Brackets are special to fnmatch, not to ssh, where a name may be [gpu1]:2222.
    escaped = pattern.lower().replace("[", "[[]")
    return fnmatch.fnmatchcase(host, escaped)


def _is_hash_of(pattern: str, host: str) -> bool:
    try:
        salt, digest = (base64.b64decode(part) for part in pattern[3:].split("|"))
    except (ValueError, binascii.Error):
        return False
    return hmac.compare_digest(hmac.new(salt, host.encode(), hashlib.sha1).digest(), digest)


class KnownHosts:
    """The keys in known_hosts files.

    Args:
        paths: the files, the user's before the system's; missing files are ignored.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._entries = [entry for path in paths for entry in _read(path)]
        self._found: dict[str, list[KnownHostsEntry]] = {}

    def _of(self, name: str) -> list[KnownHostsEntry]:
        """Return the lines of a host, cached by name: hashed names make the search slow."""
        if name not in self._found:
            self._found[name] = [entry for entry in self._entries if entry.names(name)]
        return self._found[name]

    def status(self, names: Sequence[str], blob: bytes) -> tuple[HostKeyStatus, str]:
        """Return a host key's status and the line that determines it.

        Args:
            names: the names to look up, the preferred one first; see `lookup_names`.
            blob: the key in wire format.
        """
        for entry in self.marked(names, REVOKED):
            if entry.blob == blob:
                return HostKeyStatus.REVOKED, entry.place
        other = ""
        for name in names:
            for entry in self._of(name):
                if entry.marker:
                    continue
                if entry.blob == blob:
                    return HostKeyStatus.KNOWN, entry.place
                # A host may have keys of several types. A key of another type is a change too,
                # because the handshake requests the known types first.
                if name == names[0]:
                    other = other or entry.place
        return (HostKeyStatus.CHANGED, other) if other else (HostKeyStatus.UNKNOWN, "")

    def kinds(self, names: Sequence[str]) -> list[str]:
        """Return the types of the host's known keys."""
        return [entry.kind for entry in self.marked(names, "")]

    def marked(self, names: Sequence[str], marker: str) -> list[KnownHostsEntry]:
        """Return the lines of a host that have a marker; with ``""``, those that have none."""
        return [entry for name in names for entry in self._of(name) if entry.marker == marker]


def lookup_names(hostname: str, port: int, alias: str) -> list[str]:
    """Return the names to look up a host's key by; a new key is recorded under the first."""
    name = (alias or hostname).lower()
    return [name] if port == 22 or alias else [f"[{name}]:{port}", name]


def fingerprint(blob: bytes) -> str:
    """Return a key's fingerprint as ssh shows it: ``SHA256:...``."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def _read(path: Path) -> tuple[KnownHostsEntry, ...]:
    """Return the lines of a file, cached until it changes: many hosts use it at once."""
    try:
        status = path.stat()
        return _parse(path, (status.st_ino, status.st_mtime_ns, status.st_size))
    except OSError:
        return ()


@functools.lru_cache(maxsize=64)
def _parse(path: Path, _state: tuple[int, int, int]) -> tuple[KnownHostsEntry, ...]:
    lines = path.read_bytes().decode(errors="replace").splitlines()
    found = (_entry(line, f"{path}:{number}") for number, line in enumerate(lines, 1))
    return tuple(entry for entry in found if entry is not None)


def read_keys(path: Path) -> list[tuple[str, bytes]]:
    """Return (type, key in wire format) of each line of a file; none if it does not exist."""
    return [(entry.kind, entry.blob) for entry in _read(path)]


def _entry(line: str, place: str) -> KnownHostsEntry | None:
    words = line.split()
    marker = words.pop(0) if words and words[0] in (CERT_AUTHORITY, REVOKED) else ""
    if len(words) < 3 or words[0].startswith(("#", "@")):
        return None
    try:
        blob = base64.b64decode(words[2], validate=True)
    except (ValueError, binascii.Error):
        return None
    # The key's type is also in its blob; a line where the two differ is malformed.
    length = int.from_bytes(blob[:4], "big")
    return (
        KnownHostsEntry(marker, words[0], kind=words[1], blob=blob, place=place)
        if blob[4 : 4 + length] == words[1].encode()
        else None
    )


def record(path: Path, name: str, kind: str, blob: bytes, *, hashed: bool) -> None:
    """Add a key to a file, which is created if it does not exist.

    Raises:
        OSError: the file cannot be written.
    """
    private_dirs.make(path.parent)
    if hashed:
        salt = secrets.token_bytes(20)
        digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
        name = f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"
    line = f"{name} {kind} {base64.b64encode(blob).decode()}\n"
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(handle, "rb+") as stream:
        if not os.path.isfile(path):
            return  # UserKnownHostsFile /dev/null: nothing is recorded
        fcntl.flock(stream, fcntl.LOCK_EX)  # keys of many hosts may be recorded at once
        size = stream.seek(0, os.SEEK_END)
        if size:
            stream.seek(size - 1)
            line = line if stream.read(1) == b"\n" else f"\n{line}"
        stream.write(line.encode())


def forget(path: Path, names: Sequence[str]) -> None:
    """Remove a host's keys from a file; keep lines with a marker and other names on a line.

    Raises:
        OSError: the file cannot be written; it is unchanged.
    """
    if not path.is_file():
        return
    kept = []
    for line in path.read_bytes().decode(errors="surrogateescape").splitlines(keepends=True):
        entry = _entry(line, "")
        if entry is None or entry.marker or not any(entry.names(name) for name in names):
            kept.append(line)
            continue
        others = [
            pattern
            for pattern in entry.patterns.split(",")
            if pattern.lower() not in names and not pattern.startswith("|1|")
        ]
        if others:
            kept.append(line.replace(entry.patterns, ",".join(others), 1))
    real = path.resolve()
    content = "".join(kept).encode(errors="surrogateescape")
    files.write_atomic(real, content, mode=real.stat().st_mode & 0o777)
