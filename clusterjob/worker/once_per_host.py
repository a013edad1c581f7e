"""Those who wait say so: of all processes of one machine that wait for the same, one speaks."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterator

_BACKLOG = 4096
_others: set[str] = set()  # names under which another process of this user's was found
_FIRST_NOTICE, _LATER_NOTICES = (
    4.0,
    30.0,
)  # seconds before the first line that says who is missing, and between later ones


def say(text: str) -> None:
    """Write one line into stderr."""
    print(f"clusterjob: {text}", file=sys.stderr, flush=True)


def notices() -> Iterator[float]:
    """Return when to say that one waits, in seconds from the beginning."""
    due = _FIRST_NOTICE
    while True:
        yield due
        due += _LATER_NOTICES if due > _FIRST_NOTICE else _LATER_NOTICES - _FIRST_NOTICE


def take_turn(subject: str) -> socket.socket | None:
    """Return a sign that this process speaks, until it is closed or the process ends; None while
    another one speaks.

    It is a Unix socket without a file (unix(7), "abstract"), whose name only one process of a
    machine can have: whichever asks first, so that nobody is silent because a particular one, such
    as local rank 0, is not there.

    Args:
        subject: what is spoken of.
    """
    import hashlib

    name = f"\0clusterjob-speaks-{os.getuid()}-{hashlib.sha256(subject.encode(errors='surrogateescape')).hexdigest()[:32]}"
    sign = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sign.bind(name)
        sign.listen(_BACKLOG)
        _others.discard(name)
    except OSError:
        if name in _others or is_ours(name):
            _others.add(name)  # asked once: a connection that nobody accepts stays in the backlog
            sign.close()
            return None
    return sign


def is_ours(name: str) -> bool:
    """Return whether it is this user who listens under a name: anybody may take one. Where the
    backlog is full, nobody knows.

    Args:
        name: an abstract one, with its leading zero byte.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full backlog holds up a blocking connect for ever (unix(7))
        try:
            probe.connect(name)
        except OSError:
            return False
        _, uid, _ = struct.unpack(
            "3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        )
    return bool(uid == os.getuid())
