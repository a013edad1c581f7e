"""Forward TCP ports of a job's node to this machine, like `ssh -L`."""

from __future__ import annotations

import contextlib
import errno
import itertools
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clusterjob.core.inside import connection
from clusterjob.core.inside.connection import InsideConnection
from clusterjob.core.inside.local_end import Signals
from clusterjob.core.records import Record
from clusterjob.errors import ClusterJobError, UsageError
from clusterjob.node.inside import streams
from clusterjob.node.system import processes

LOOPBACK = "127.0.0.1"
_TRIES = 20  # ports above a busy one that are tried
_TICK = 1.0  # seconds between two checks of the connection
_QUIET = 5.0  # seconds in which an equal message is not repeated
_PAUSE = 0.1  # seconds without new connections if this process has no free descriptor


@dataclass(frozen=True)
class Port:
    """One port to forward.

    Attributes:
        remote: the port on the node.
        local: the port on this machine: 0 for any free one, None for `remote` or one above it.
    """

    remote: int
    local: int | None = None

    @classmethod
    def parse(cls, text: str) -> Port:
        """Return the port of ``[LOCAL:]PORT``.

        Raises:
            UsageError: it is not in this form.
        """
        local, colon, remote = text.rpartition(":")
        numbers = [remote, *([local] if colon else [])]
        if not all(each.isascii() and each.isdigit() and int(each) < 65536 for each in numbers):
            raise UsageError(f"{text!r} is no port", "write PORT or LOCAL:PORT, such as 8080:6006")
        if int(remote) == 0:
            raise UsageError(f"{text}: port 0 of a node does not exist", "name the server's port")
        return cls(int(remote), int(local) if colon else None)


def listen(port: Port) -> socket.socket:
    """Return a socket that listens for a port on this machine's loopback.

    Raises:
        ClusterJobError: the named local port is in use, or may not be used.
    """
    if port.local is not None:
        candidates = [port.local]
    else:
        above = range(port.remote, min(65536, port.remote + _TRIES))
        candidates = [*above, 0]
    for candidate in candidates:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((LOOPBACK, candidate))
            sock.listen(128)
            sock.setblocking(False)
            return sock
        except OSError as error:
            sock.close()
            if port.local is not None:
                raise ClusterJobError(
                    f"port {candidate} of this machine cannot be used: {error.strerror}",
                    f"0:{port.remote} takes a free port",
                ) from error
    raise ClusterJobError("no port of this machine is free")


def run(
    record: Record,
    ports: Sequence[Port],
    *,
    node: int | None,
    show: Callable[[str], None],
    warn: Callable[[str], None],
) -> int:
    """Forward ports until Ctrl-C, or the end of the job.

    Args:
        record: the job.
        ports: the ports.
        node: the node; None for node 0.
        show: prints one line about each port.
        warn: shows one line to the user.

    Returns:
        130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        ClusterJobError: a port of this machine cannot be used.
        InsideError: the job does not run or has ended, or the connection broke.
    """
    backend = connection.check(record, node)
    processes.raise_open_files()
    with contextlib.ExitStack() as stack:
        listeners: dict[int, tuple[socket.socket, int]] = {}
        for port in ports:
            sock = stack.enter_context(listen(port))
            listeners[sock.fileno()] = (sock, port.remote)
        entered = connection.enter(record, backend, {"relay": True}, node=node)
        stack.callback(entered.close)
        for sock, remote in listeners.values():
            where = f"port {remote} of node {entered.node} ({entered.host})"
            show(f"http://{LOOPBACK}:{sock.getsockname()[1]} is forwarded to {where}")
        return _Relay(entered, listeners, warn=warn).run(stack.enter_context(Signals()))


class _Relay:
    """The connections of one `run`."""

    def __init__(
        self,
        entered: InsideConnection,
        listeners: dict[int, tuple[socket.socket, int]],
        warn: Callable[[str], None],
    ) -> None:
        self._entered, self._listeners, self._warn = entered, listeners, warn
        self._numbers = itertools.count(1)
        self._warned: dict[str, float] = {}
        self._pause_until = 0.0
        entered.on_reset = self._refused

    def run(self, signals: Signals) -> int:
        connected = self._entered.streams
        while not (self._entered.ended or connected.closed):
            accepting = (
                len(connected.streams) < streams.MAX_STREAMS
                and time.monotonic() >= self._pause_until
            )
            ready = streams.wait_for_any(
                [connected],
                [signals.descriptor, *(self._listeners if accepting else ())],
                _TICK if accepting else _PAUSE,
            )
            for number in signals.read() if signals.descriptor in ready else ():
                if number != signal.SIGWINCH:
                    return 128 + number
            for descriptor in self._listeners.keys() & ready.keys():
                self._accept(*self._listeners[descriptor])
            self._entered.handle(ready)
        raise self._entered.failure()

    def _accept(self, listener: socket.socket, remote: int) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._pause_until = time.monotonic() + _PAUSE
            return
        number = next(self._numbers)
        self._entered.streams.tell({"port": remote}, number)
        streams.add_socket(self._entered.streams, number, sock)

    def _refused(self, why: str) -> None:
        if time.monotonic() - self._warned.get(why, -_QUIET) >= _QUIET and len(self._warned) < 100:
            self._warned[why] = time.monotonic()
            self._warn(f"node {self._entered.node}: port {why}")
