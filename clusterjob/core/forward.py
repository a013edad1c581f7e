"""Forward TCP ports of a job's node to this machine, like `ssh -L`."""

from __future__ import annotations

import contextlib
import functools
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any

from clusterjob.backends import base
from clusterjob.core import inside
from clusterjob.core.records import Record
from clusterjob.errors import ClusterJobError, InsideError, UsageError
from clusterjob.node.inside import MARKER, read_piece, receive_pieces, send_pieces, write_piece
from clusterjob.node.system import processes
from clusterjob.node.system.sanitize import sanitize
from clusterjob.remote.pool import in_background

LOOPBACK = "127.0.0.1"
_TRIES = 20  # ports above a busy one that are tried
_TICK = 0.5  # seconds between two checks of the job
_QUIET = 5.0  # seconds in which an equal message is not repeated
_PAUSE = 0.1  # seconds without new connections if this process has no free descriptor
# A command beside a worker, which ends with the job, and with its stdin.
_WATCH = f"echo '{MARKER.decode()}'$(uname -n); exec cat > /dev/null"
_LONGEST_LINE = 1 << 12  # bytes of a line that a login prints, or the relay


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
        130 after Ctrl-C; 255 if the job or the connection ended, which a line on stderr says.

    Raises:
        ClusterJobError: a port of this machine cannot be used.
        InsideError: the job does not run, or cannot be reached.
    """
    backend = inside.check(record, node)
    node = inside.node_of(record, node, None)
    processes.raise_open_files()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # end what this process has started
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    with contextlib.ExitStack() as stack:
        listeners = {stack.enter_context(listen(port)): port.remote for port in ports}
        relays = _Relays(record, backend, node, warn=warn)
        watch = relays.start({"rank": None, "argv": ["/bin/sh", "-c", _WATCH]}, subprocess.PIPE)
        # Another process may keep it open, such as a shared connection.
        errors, watch.stderr = watch.stderr, None
        told = in_background(functools.partial(_pass_on, errors, warn))
        stack.enter_context(watch)
        stack.callback(relays.close)
        host = sanitize(_answer(watch).decode(errors="replace"))
        for sock, remote in listeners.items():
            if host:
                where = f"port {remote} of node {node} ({host})"
                show(f"http://{LOOPBACK}:{sock.getsockname()[1]} is forwarded to {where}")
        try:
            while watch.poll() is None:
                for listener in select.select(listeners, [], [], _TICK)[0]:
                    relays.accept(listener, listeners[listener])
        except KeyboardInterrupt:
            return 130
        wait([told], 1.0)
        return InsideError.exit_code


def _pass_on(errors: Any, warn: Callable[[str], None]) -> None:
    """Show the lines of ssh, srun and the node."""
    with errors:
        for line in iter(functools.partial(errors.readline, _LONGEST_LINE), b""):
            if text := line.decode(errors="replace").strip():
                warn(text.removeprefix("clusterjob: "))


def _answer(process: subprocess.Popen[bytes]) -> bytes:
    """Return the line of an answer, after the text of a login; empty if there is none."""
    assert process.stdout is not None
    while line := process.stdout.readline(_LONGEST_LINE):
        if line.startswith(MARKER):
            return line.removeprefix(MARKER).strip()
    return b""


class _Relays:
    """What carries the connections of one `run`; each connection has a thread.

    OpenSSH carries each by a command of its own. Slurm takes long to start a step: there a relay
    on the node carries one after the other.
    """

    def __init__(
        self, record: Record, backend: base.Executor, node: int, warn: Callable[[str], None]
    ) -> None:
        self._record, self._backend, self._node, self._warn = record, backend, node, warn
        self._started: list[subprocess.Popen[bytes]] = []
        self._idle: list[subprocess.Popen[bytes]] = []
        self._limit = threading.Semaphore(inside.at_once(record) - 1)  # one watches the job
        self._warned: dict[str, float] = {}

    def accept(self, listener: socket.socket, port: int) -> None:
        """Accept a connection, if one is still there."""
        try:
            sock, _ = listener.accept()
        except OSError:  # the client is gone, or no descriptor is free
            time.sleep(_PAUSE)
            return
        threading.Thread(target=self._serve, args=(sock, port), daemon=True).start()

    def _serve(self, sock: socket.socket, port: int) -> None:
        try:
            with sock:
                argv = self._backend.tunnel(self._record, self._node, port)
                why = self._tunnel(sock, argv) if argv else self._relay(sock, port)
        except (ClusterJobError, OSError) as error:
            why = str(error)
        if why and time.monotonic() - self._warned.get(why, -_QUIET) >= _QUIET:
            self._warned[why] = time.monotonic()
            self._warn(f"node {self._node}: port {port}: {why}")

    def _tunnel(self, sock: socket.socket, argv: Sequence[str]) -> str:
        """Carry a connection by a command of ssh; return why it failed, or nothing."""
        number = sock.fileno()
        process = subprocess.Popen(argv, stdin=number, stdout=number, stderr=subprocess.DEVNULL)
        self._started.append(process)
        sock.close()
        # Through a shared connection, ssh names no reason.
        why = "Connection refused, or sshd forwards no ports" if process.wait() else ""
        self._started.remove(process)
        return why

    def _relay(self, sock: socket.socket, port: int) -> str:
        """Carry a connection by a relay; return why the port cannot be reached, or nothing."""
        with self._limit:
            relay = self._idle_relay()
            assert relay.stdin is not None
            assert relay.stdout is not None
            try:
                write_piece(relay.stdin, str(port).encode())
                answer = read_piece(relay.stdout)
                if not answer:
                    raise ConnectionError
                if answer == b"+":
                    back = send_pieces(sock, relay.stdin)
                    receive_pieces(relay.stdout, sock)
                    back.join()
            except (OSError, ValueError):  # the client reads no more, or the relay has ended
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # ends the thread
                with contextlib.suppress(OSError), relay:
                    relay.terminate()
                self._started.remove(relay)
                return ""
            self._idle.append(relay)
        return "" if answer == b"+" else answer.decode(errors="replace")[:200]

    def _idle_relay(self) -> subprocess.Popen[bytes]:
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        relay = self.start({"rank": None, "relay": True}, subprocess.DEVNULL)
        _answer(relay)
        return relay

    def start(self, request: Mapping[str, Any], stderr: int | None) -> subprocess.Popen[bytes]:
        """Start a program on the node, until `close`."""
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": stderr,
        }
        process = inside.start(self._record, self._backend, self._node, request, **pipes)
        self._started.append(process)
        return process

    def close(self) -> None:
        """End all programs; ssh ends with its connection."""
        for process in self._started:
            process.terminate()
