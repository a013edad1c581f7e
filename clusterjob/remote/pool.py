"""Connections to many hosts: one per host, shared bastions, limited handshakes per machine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

from clusterjob.core.hosts import Host
from clusterjob.errors import HostError
from clusterjob.remote import ssh_config
from clusterjob.remote.connect import connect
from clusterjob.remote.ssh_config import Target
from clusterjob.remote.transport import Connection, ConnectOptions

# Concurrent handshakes with one machine: sshd drops connections beyond 10 (MaxStartups 10:30:100).
AT_ONCE = 8
_THREADS = 128  # concurrent calls of `for_each`

Key = TypeVar("Key")
Value = TypeVar("Value")
Result = TypeVar("Result")


class Pool:
    """Connections to hosts, made on first use and kept open.

    Args:
        options: options of all connections.
    """

    def __init__(self, options: ConnectOptions) -> None:
        self.options = replace(options, warn=self._warn_once)
        self._warn = options.warn
        self._lock = threading.Lock()
        self._limits: dict[str, threading.Semaphore] = {}
        # By path and transport.
        self._bastions: dict[
            tuple[tuple[Host, ...], str], tuple[threading.Lock, list[Connection]]
        ] = {}
        self._jumps: dict[Host, tuple[Host, ...]] = {}  # of bastions
        self._connections: dict[Host, Connection] = {}
        self._alone: dict[Host, threading.Lock] = {}
        self._warned = False
        self._closed = False

    def resolve(self, host: Host) -> Target:
        """Return the ssh configuration of a host."""
        return ssh_config.resolve(host, self.options.ssh_config)

    def connection(self, host: Host) -> Connection:
        """Return the connection to a host; connect if there is none or it broke.

        Raises:
            HostError: the host cannot be used.
        """
        with self._lock:
            alone = self._alone.setdefault(host, threading.Lock())
        with alone:  # threads that need the same host share one connection
            with self._lock:
                known = self._connections.get(host)
            if known is not None and known.alive:
                return known
            made = self._connect(self.resolve(host))
            with self._lock:
                if not self._closed:
                    self._connections[host] = made
                    return made
        made.close()
        raise HostError(str(host), "the connection was closed")

    def through(self, target: Target, transport: str) -> Connection | None:
        """Return the connection to the last bastion before a host; None if it needs none.

        Args:
            target: the host.
            transport: the transport of the bastion; one of `TRANSPORTS`.

        Raises:
            HostError: the bastion cannot be used.
        """
        self._refuse_circle(target)
        return self._bastion(target.jumps, transport)

    def _refuse_circle(self, target: Target) -> None:
        """Refuse bastions that lead back to one of themselves, as they would wait for each other.

        Raises:
            HostError: the bastions do that.
        """
        met: set[Host] = set()
        jumps = target.jumps
        while jumps:
            first = jumps[0]
            if first in met:
                raise HostError(
                    target.label,
                    f"ProxyJump leads in a circle over {first}",
                    "correct ProxyJump in the ssh configuration",
                )
            met.add(first)
            if first not in self._jumps:
                self._jumps[first] = self.resolve(first).jumps
            jumps = self._jumps[first]

    def _bastion(self, path: tuple[Host, ...], transport: str) -> Connection | None:
        """Return the connection to the last bastion of a path; None if the path is empty."""
        if not path:
            return None
        with self._lock:
            lock, held = self._bastions.setdefault((path, transport), (threading.Lock(), []))
        with lock:
            if held and held[0].alive:
                return held[0]
            target = self.resolve(path[-1])
            before = path[:-1] or target.jumps  # as ssh: the first one may be behind others
            options = replace(self.options, transport=transport)
            held[:] = [connect(target, options, through=partial(self._bastion, before))]
            return held[0]

    def _connect(self, target: Target) -> Connection:
        with self._limit(target):
            return connect(target, self.options, through=partial(self.through, target))

    def _warn_once(self, text: str) -> None:
        with self._lock:
            first, self._warned = not self._warned, True
        if first:
            self._warn(text)

    def _limit(self, target: Target) -> threading.Semaphore:
        """Return the semaphore that limits handshakes with the first machine on the route.

        Hosts with the same address count as one machine.
        """
        if target.jumps:
            first = str(target.jumps[0])
        else:
            try:
                first = str(
                    socket.getaddrinfo(target.hostname, target.port, type=socket.SOCK_STREAM)[0][4][
                        0
                    ]
                )
            except (OSError, UnicodeError):
                first = target.hostname  # connecting will report the error
        with self._lock:
            return self._limits.setdefault(first, threading.Semaphore(AT_ONCE))

    def close(self) -> None:
        """Close all connections, those to bastions last."""
        with self._lock:
            self._closed = True
            connections = [
                *self._connections.values(),
                *(held[0] for _, held in self._bastions.values() if held),
            ]
            self._connections.clear()
            self._bastions.clear()
        for connection in connections:
            connection.close()


class TaskOutcome(Generic[Key, Result]):
    """Results and errors of `for_each`, by key."""

    def __init__(self) -> None:
        self.results: dict[Key, Result] = {}
        self.errors: dict[Key, HostError] = {}


def for_each(
    keys: Sequence[Key],
    work: Callable[[Key], Result],
    stop: threading.Event | None = None,
    at_once: int = _THREADS,
) -> TaskOutcome[Key, Result]:
    """Call a function for many hosts in parallel; collect the results and errors of all.

    Args:
        keys: arguments of the calls.
        work: the function; raises `HostError` if it fails.
        stop: set when the calls are interrupted, for example by Ctrl-C, so that waiting work ends.
        at_once: maximum number of concurrent calls.

    Raises:
        BaseException: any error other than `HostError`, such as Ctrl-C or a bug.
    """
    outcome: TaskOutcome[Key, Result] = TaskOutcome()
    futures: list[tuple[Key, Future[Result]]] = [(key, Future()) for key in keys]
    waiting = iter(futures)
    taking = threading.Lock()

    def serve() -> None:
        while True:
            with taking:
                key, future = next(waiting, (None, None))
            if future is None:
                return
            _fulfil(future, partial(work, key))  # type: ignore[arg-type]

    for _ in range(min(len(keys), at_once)):
        threading.Thread(target=serve, name="clusterjob-ssh", daemon=True).start()
    try:
        for key, future in futures:
            try:
                outcome.results[key] = future.result()
            except HostError as error:
                outcome.errors[key] = error
    except BaseException:
        if stop is not None:
            stop.set()
        with taking:
            waiting = iter(())
        raise
    return outcome


def in_background(work: Callable[[], Result]) -> Future[Result]:
    """Run a function in a daemon thread.

    The program can end while the thread still waits for a host that does not answer.
    """
    future: Future[Result] = Future()
    threading.Thread(
        target=_fulfil, args=(future, work), name="clusterjob-ssh", daemon=True
    ).start()
    return future


def _fulfil(future: Future[Result], work: Callable[[], Result]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


def complaint(errors: Collection[HostError], total: int) -> tuple[str, str]:
    """Return (message, hint) for hosts that cannot be used, each in one line."""
    listed = list(errors)
    hints = list(dict.fromkeys(error.hint for error in listed if error.hint))
    hint = "; ".join(hints[:3])
    if total == 1 or len(listed) == 1:
        return listed[0].message, hint
    reasons = "; ".join(error.message for error in listed)
    return f"{len(listed)} of {total} hosts cannot be used: {reasons}", hint
