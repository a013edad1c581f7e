"""Print each waiting notice once per host."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Iterator

from clusterjob.node.system import network

_BACKLOG = 4096
_others: set[str] = set()  # socket names that another process of this user holds
# Seconds before the first notice about missing ranks, and between later notices.
_FIRST_NOTICE, _LATER_NOTICES = 4.0, 30.0


def print_line(text: str) -> None:
    """Write one line to stderr."""
    print(f"clusterjob: {text}", file=sys.stderr, flush=True)


def notice_times() -> Iterator[float]:
    """Yield the times at which to print a waiting notice, in seconds from the beginning."""
    due = _FIRST_NOTICE
    while True:
        yield due
        due += _LATER_NOTICES if due > _FIRST_NOTICE else _LATER_NOTICES - _FIRST_NOTICE


def lock_subject(subject: str) -> socket.socket | None:
    """Return this host's lock for notices about a subject; None if another process holds it.

    The lock is a Unix socket without a file (unix(7), "abstract"). Only one process of a machine
    can bind its name. It is released when it is closed or the process ends. A fixed choice, such as
    local rank 0, would not work: that process may be missing.

    Args:
        subject: the subject of the notices.
    """
    name = (
        f"\0clusterjob-notice-{os.getuid()}-"
        f"{hashlib.sha256(subject.encode(errors='surrogateescape')).hexdigest()[:32]}"
    )
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(name)
        lock.listen(_BACKLOG)
        _others.discard(name)
    except OSError:
        if name in _others or is_ours(name):
            # Connect only once: a connection that is never accepted stays in the backlog.
            _others.add(name)
            lock.close()
            return None
    return lock


def is_ours(name: str) -> bool:
    """Return whether a process of this user listens on an abstract socket name.

    Any user may take a name. The result is False if the backlog is full, because then the owner
    cannot be found.

    Args:
        name: an abstract socket name, with its leading zero byte.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a blocking connect to a full backlog never returns (unix(7))
        try:
            probe.connect(name)
        except OSError:
            return False
        return network.peer_of(probe)[1] == os.getuid()
