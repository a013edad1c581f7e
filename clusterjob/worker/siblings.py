"""Processes that one parent has started by multiprocessing find each other without being told an
address.

Rank 0 has the kernel choose a port of the loopback interface and listens on it from that moment on:
nobody else can take it. The port is in the name of a Unix socket without a file (unix(7),
"abstract"), which ends with the process. The name begins and ends with what the parent's children
alone can compute: they have inherited multiprocessing's key. Nobody connects to that socket:
whoever has filled its backlog would hold everybody up.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import time

from clusterjob.errors import GangError
from clusterjob.worker import once_per_host

ADDRESS = "127.0.0.1"
_PATIENCE = 1800.0  # seconds, as torch's own for gloo
_PAUSE = 0.01
_BACKLOG = 4096
_held: dict[int, socket.socket] = {}  # rank 0's: port -> a listener that nobody has taken over
_signs: list[socket.socket] = []
_rounds = itertools.count()


def are_there() -> bool:
    """Return whether this process was started by multiprocessing, or by what stands on it, such as
    torch.multiprocessing.
    """
    multiprocessing = sys.modules.get("multiprocessing")
    return multiprocessing is not None and multiprocessing.parent_process() is not None


def meet(rank: int, timeout: float | None = None) -> int:
    """Return the port at which rank 0 listens.

    Args:
        rank: this process's.
        timeout: seconds to wait for rank 0.

    Raises:
        GangError: rank 0 does not come, or is there already.
    """
    prefix = _prefix(next(_rounds))
    return _listen(prefix) if rank == 0 else _find(prefix, rank, patience=timeout or _PATIENCE)


def take_listener(port: int) -> socket.socket | None:
    """Return the listener that `meet` has made on this port, which is the caller's from now on."""
    return _held.pop(port, None)


def part() -> None:
    """Take down the sign that leads to rank 0: all have met, or have failed to."""
    while _signs:
        _signs.pop().close()
    while _held:
        _held.popitem()[1].close()


def _prefix(number: int) -> str:
    return f"clusterjob-{_code(f'{os.getppid()}.{number}')}-"


def _code(text: str) -> str:
    """Return what the parent's children alone can make of a text."""
    import hashlib
    import hmac
    import multiprocessing

    key = bytes(multiprocessing.current_process().authkey)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()[:32]


def _listen(prefix: str) -> int:
    if _found(prefix):
        raise GangError(
            "another rank 0 of the same parent waits for its processes: two groups at once need addresses",
            "give init() a master_addr and a master_port",
        )
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((ADDRESS, 0))
    listener.listen(_BACKLOG)
    port = int(listener.getsockname()[1])
    sign = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sign.bind(f"\0{_sign(prefix, port)}")
    sign.listen()  # only a socket that listens is sure to be listed
    _held[port] = listener
    _signs.append(sign)
    return port


def _find(prefix: str, rank: int, patience: float) -> int:
    begin = time.monotonic()
    notices = once_per_host.notices()
    due = next(notices)
    turn = None
    try:
        while True:
            for port in _found(prefix):
                if _is_ours(port):
                    return port
            waited = time.monotonic() - begin
            if waited > patience:
                raise GangError(
                    f"rank {rank} has not heard of rank 0 among its parent's processes; gave up after {waited:.0f} s"
                )
            if waited > due:
                due = next(notices)
                turn = turn or once_per_host.take_turn(prefix)
                if turn:
                    once_per_host.say(
                        f"rank {rank} waits for rank 0 among its parent's processes; {waited:.0f} s so far"
                    )
            time.sleep(_PAUSE)
    finally:
        if turn:
            turn.close()


def _found(prefix: str) -> list[int]:
    with open("/proc/net/unix", encoding="ascii", errors="replace") as table:
        names = [
            words[-1] for words in map(str.split, table) if words
        ]  # a name may hold newlines, and anybody may bind one
    ports = [
        name[len(prefix) + 1 :].partition("-")[0] for name in names if name.startswith(f"@{prefix}")
    ]
    numbers = [int(port) for port in ports if port.isascii() and port.isdigit() and len(port) < 6]
    return [port for port in numbers if f"@{_sign(prefix, port)}" in names]


def _sign(prefix: str, port: int) -> str:
    return f"{prefix}{port}-{_code(f'{prefix}{port}')}"


def _is_ours(port: int) -> bool:
    """Return whether it is this user who listens there: the name of one that has ended may be
    anybody's.
    """
    address = f"{int.from_bytes(socket.inet_aton(ADDRESS), sys.byteorder):08X}:{port:04X}"
    with open("/proc/net/tcp", encoding="ascii") as table:
        rows = [line.split() for line in table]
    return any(
        row[1] == address and row[3] == "0A" and row[7] == str(os.getuid()) for row in rows[1:]
    )
