"""Find rank 0 without an address among the multiprocessing children of one parent.

Rank 0 listens on a loopback port that the kernel chooses, so that no other process can take it. It
publishes the port in the name of a Unix socket without a file (unix(7), "abstract"), which ends
with the process. The name contains two codes that only the parent's children can compute, because
they have inherited multiprocessing's key. The other ranks read the name in /proc and do not
connect: another user could fill the socket's backlog and block them.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import time

from clusterjob.errors import RendezvousError
from clusterjob.worker import once_per_host

ADDRESS = "127.0.0.1"
_TIMEOUT = 1800.0  # seconds, torch's default for gloo
_PAUSE = 0.01
_BACKLOG = 4096
_held: dict[int, socket.socket] = {}  # on rank 0: port -> listener, until the store uses it
_signs: list[socket.socket] = []
_rounds = itertools.count()


def started_by_multiprocessing() -> bool:
    """Return whether multiprocessing, or a package based on it, started this process."""
    multiprocessing = sys.modules.get("multiprocessing")
    return multiprocessing is not None and multiprocessing.parent_process() is not None


def find_port(rank: int, timeout: float | None = None) -> int:
    """Return the port at which rank 0 listens.

    Args:
        rank: this process's rank.
        timeout: seconds to wait for rank 0; None for 1800.

    Raises:
        RendezvousError: rank 0 does not listen in time, or another rank 0 of the same parent
            already listens.
    """
    prefix = _prefix(next(_rounds))
    return _listen(prefix) if rank == 0 else _find(prefix, rank, seconds=timeout or _TIMEOUT)


def take_listener(port: int) -> socket.socket | None:
    """Return the listener that `find_port` has made on this port; the caller owns it afterwards."""
    return _held.pop(port, None)


def close() -> None:
    """Close rank 0's Unix sockets and unused listeners after the rendezvous has ended."""
    while _signs:
        _signs.pop().close()
    while _held:
        _held.popitem()[1].close()


def _prefix(number: int) -> str:
    return f"clusterjob-{_code(f'{os.getppid()}.{number}')}-"


def _code(text: str) -> str:
    """Return a code of a text that only the parent's children can compute."""
    import hashlib
    import hmac
    import multiprocessing

    key = bytes(multiprocessing.current_process().authkey)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()[:32]


def _listen(prefix: str) -> int:
    if _found(prefix):
        raise RendezvousError(
            "another rank 0 of the same parent waits for its processes: "
            "two groups at once need addresses",
            "give init() a master_addr and a master_port",
        )
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((ADDRESS, 0))
    listener.listen(_BACKLOG)
    port = int(listener.getsockname()[1])
    sign = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sign.bind(f"\0{_sign(prefix, port)}")
    sign.listen()  # /proc/net/unix always lists a listening socket
    _held[port] = listener
    _signs.append(sign)
    return port


def _find(prefix: str, rank: int, seconds: float) -> int:
    begin = time.monotonic()
    notices = once_per_host.notice_times()
    due = next(notices)
    turn = None
    try:
        while True:
            for port in _found(prefix):
                if _is_ours(port):
                    return port
            waited = time.monotonic() - begin
            if waited > seconds:
                raise RendezvousError(
                    f"rank {rank} has not found rank 0 among its parent's processes; "
                    f"gave up after {waited:.0f} s"
                )
            if waited > due:
                due = next(notices)
                turn = turn or once_per_host.lock_subject(prefix)
                if turn:
                    once_per_host.print_line(
                        f"rank {rank} waits for rank 0 among its parent's processes; "
                        f"{waited:.0f} s so far"
                    )
            time.sleep(_PAUSE)
    finally:
        if turn:
            turn.close()


def _found(prefix: str) -> list[int]:
    with open("/proc/net/unix", encoding="ascii", errors="replace") as table:
        # Any user may bind a name, and a name may contain newlines.
        names = [words[-1] for words in map(str.split, table) if words]
    ports = [
        name[len(prefix) + 1 :].partition("-")[0] for name in names if name.startswith(f"@{prefix}")
    ]
    numbers = [int(port) for port in ports if port.isascii() and port.isdigit() and len(port) < 6]
    return [port for port in numbers if f"@{_sign(prefix, port)}" in names]


def _sign(prefix: str, port: int) -> str:
    return f"{prefix}{port}-{_code(f'{prefix}{port}')}"


def _is_ours(port: int) -> bool:
    """Return whether this user listens on the port; another user may have copied the name."""
    address = f"{int.from_bytes(socket.inet_aton(ADDRESS), sys.byteorder):08X}:{port:04X}"
    with open("/proc/net/tcp", encoding="ascii") as table:
        rows = [line.split() for line in table]
    return any(
        row[1] == address and row[3] == "0A" and row[7] == str(os.getuid()) for row in rows[1:]
    )
