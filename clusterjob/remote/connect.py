"""One SSH connection: connect, verify the host key and log in, each with a timeout.

A host may accept TCP and then send nothing: without these timeouts its caller would wait forever.
Each failure is a one-line error.
"""

from __future__ import annotations

import logging
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import paramiko
from paramiko.common import DEFAULT_WINDOW_SIZE, MSG_CHANNEL_DATA, MSG_CHANNEL_EXTENDED_DATA

from clusterjob.errors import HostError
from clusterjob.remote import auth, host_certificates, host_keys
from clusterjob.remote.host_keys import HostKey
from clusterjob.remote.ssh_config import Target

# Without a handler, paramiko prints a traceback for each refused connection.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").propagate = False

DEFAULT_TIMEOUT = 10.0  # seconds for each phase
_TRIES = 6  # attempts to connect to a server that drops connections (MaxStartups)
_FIRST_PAUSE = 0.15  # seconds before the second try; doubled, with jitter, for each later one
# Milliseconds without an acknowledgement after which the kernel closes a connection.
_TCP_USER_TIMEOUT = 8000
_MAX_UNREAD = 2 * DEFAULT_WINDOW_SIZE  # maximum unread bytes of one channel


class _DroppedError(Exception):
    """The server closed the connection before it sent anything, as beyond MaxStartups."""


@dataclass(frozen=True)
class ConnectOptions:
    """Options of all connections of one pool.

    Attributes:
        timeout: seconds for each phase of a connection, unless ConnectTimeout is configured.
        warn: called with each line that the user should see.
        ssh_config: a configuration file that replaces the user's.
    """

    timeout: float = DEFAULT_TIMEOUT
    warn: Callable[[str], None] = lambda _: None
    ssh_config: Path | None = None


def _checked(name: str) -> Any:
    feed = getattr(paramiko.Channel, name)

    def check(channel: Any, message: Any) -> None:
        if len(channel.in_buffer) + len(channel.in_stderr_buffer) > _MAX_UNREAD:
            raise paramiko.SSHException("the host sends more than the window allows")
        feed(channel, message)

    return check


class _Transport(paramiko.Transport):
    """paramiko transport that closes the connection if a host exceeds the channel window.

    paramiko buffers all unread data of a channel, even beyond the window of RFC 4254, section 5.2:
    a host that ignores the window would fill the memory.
    """

    _channel_handler_table: ClassVar[dict[int, Any]] = {
        **paramiko.Transport._channel_handler_table,  # type: ignore[attr-defined]
        MSG_CHANNEL_DATA: _checked("_feed"),
        MSG_CHANNEL_EXTENDED_DATA: _checked("_feed_extended"),
    }


class Connection:
    """A verified connection that is logged in."""

    def __init__(self, target: Target, transport: paramiko.Transport, timeout: float) -> None:
        self.target = target
        self._transport = transport
        self._timeout = timeout

    @property
    def alive(self) -> bool:
        """Whether the connection is open, as far as paramiko knows."""
        return self._transport.is_active()

    def execute(self, command: str) -> paramiko.Channel:
        """Start a command without a terminal and return its channel.

        Raises:
            HostError: the host does not start the command in time.
        """
        try:
            with _bounded(
                self._transport,
                self._timeout,
                label=self.target.label,
                what="it does not open a session",
            ):
                channel = self._transport.open_session(timeout=self._timeout)
                channel.exec_command(command)
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise HostError(
                self.target.label, f"it does not start a command: {_text(error)}"
            ) from error
        channel.settimeout(self._timeout)
        return channel

    def forward(self, hostname: str, port: int) -> paramiko.Channel:
        """Return a channel through this host to another host (direct-tcpip).

        Raises:
            HostError: this host cannot reach the other one in time.
        """
        try:
            return self._transport.open_channel(
                "direct-tcpip", (hostname, port), ("127.0.0.1", 0), timeout=self._timeout
            )
        except (paramiko.SSHException, OSError, EOFError) as error:
            why = {1: "not permitted there", 2: "connection refused or timed out"}.get(
                getattr(error, "code", 0), _text(error)
            )
            raise HostError(
                f"{hostname}:{port}", f"not reached through {self.target.label}: {why}"
            ) from error

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()


def connect(
    target: Target, options: ConnectOptions, through: Connection | None = None
) -> Connection:
    """Return a connection to a host, verified and logged in.

    Args:
        target: the host's address, user and keys.
        options: timeout and warnings.
        through: the connection to the bastion; None for a direct connection.

    Raises:
        HostError: the host cannot be used. A host whose key is not trusted gets no credentials.
    """
    timeout = target.connect_timeout or options.timeout
    pause = _FIRST_PAUSE
    for attempt in range(_TRIES):
        transport: paramiko.Transport | None = None
        try:
            transport, key = _handshake(target, timeout, through=through)
            host_keys.verify(target, key, warn=options.warn)
            auth.log_in(
                target,
                transport,
                bound=partial(
                    _bounded, transport, timeout, target.label, "it does not answer the login"
                ),
            )
            transport.set_keepalive(15)
            return Connection(target, transport, timeout=timeout)
        except _DroppedError as error:
            if attempt == _TRIES - 1:
                raise HostError(
                    target.label,
                    f"it closed the connection {_TRIES} times before it sent anything",
                    hint="too many connections at once (MaxStartups), or the port is not sshd's",
                ) from error
            time.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311 - jitter
            pause *= 2
        except BaseException:
            if transport is not None:
                transport.close()
            raise
    raise AssertionError


def host_key(target: Target, options: ConnectOptions, through: Connection | None = None) -> HostKey:
    """Return the key that a host presents, trusted or not, without logging in.

    Raises:
        HostError: the host cannot be reached.
    """
    timeout = target.connect_timeout or options.timeout
    try:
        transport, key = _handshake(target, timeout, through=through)
    except _DroppedError as error:
        raise HostError(target.label, "it closed the connection before it sent anything") from error
    transport.close()
    return key


def _handshake(
    target: Target, timeout: float, through: Connection | None
) -> tuple[paramiko.Transport, HostKey]:
    sock = _socket(target, timeout, through=through)
    try:
        transport = _Transport(sock)
    except BaseException:
        sock.close()
        raise
    try:
        transport.banner_timeout = timeout
        transport.auth_timeout = timeout
        security = transport.get_security_options()
        security.key_types = host_keys.types_to_request(target, security.key_types)
        done = threading.Event()
        # Twice the timeout: paramiko's banner_timeout already limits the wait for the banner.
        with _bounded(
            transport,
            2 * timeout,
            label=target.label,
            what="it accepts TCP and does not complete the SSH handshake",
        ):
            transport.start_client(event=done)
            while not done.wait(0.2) and transport.is_active():
                pass
        if not transport.is_active():
            raise transport.get_exception() or paramiko.SSHException("the handshake failed")
        shown = transport.get_remote_server_key()
        public = getattr(shown, "public_blob", None)
        if public is None:
            return transport, HostKey(shown.get_name(), shown.asbytes())
        certificate = host_certificates.parse(public.key_blob)
        return transport, HostKey(
            certificate.kind, certificate.key, certificate=certificate, shown=public.key_blob
        )
    except (paramiko.SSHException, OSError, EOFError, ValueError) as error:
        _hang_up(transport)
        text = _text(error)
        if isinstance(error, HostError):
            raise
        if "banner" in text and isinstance(error.__context__, TimeoutError):
            raise HostError(
                target.label, f"it accepts TCP and sends nothing for {timeout:g} s"
            ) from error
        if "banner" in text or isinstance(error, (EOFError, ConnectionError)):
            raise _DroppedError from error
        raise HostError(target.label, f"the handshake failed: {text}") from error
    except BaseException:
        _hang_up(transport)
        raise


def _hang_up(transport: paramiko.Transport) -> None:
    # Stop paramiko's handshake timer, which would otherwise run for 15 s more.
    transport.packetizer.complete_handshake()
    transport.close()


def _socket(target: Target, timeout: float, through: Connection | None) -> Any:
    if through is not None:
        try:
            return through.forward(target.hostname, target.port)
        except HostError as error:
            raise HostError(target.label, error.why, hint=error.hint) from error
    if target.proxy_command:
        return _CommandSocket(target.proxy_command)
    where = f"{target.hostname}:{target.port}"
    try:
        sock = socket.create_connection((target.hostname, target.port), timeout)
    except TimeoutError as error:
        raise HostError(target.label, f"no answer from {where} within {timeout:g} s") from error
    except socket.gaierror as error:
        raise HostError(
            target.label, f"unknown host {target.hostname}: {error.strerror}"
        ) from error
    except (OSError, UnicodeError) as error:
        raise HostError(target.label, f"{_text(error).lower()} ({where})") from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":  # elsewhere the timeout of a request ends a cut connection
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TCP_USER_TIMEOUT)
    return sock


class _CommandSocket:
    """Socket-like object over the stdin and stdout of a command (ProxyCommand)."""

    def __init__(self, command: str) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = f"exec {command}"
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.send, self.recv, self.settimeout = (
            self._socket.send,
            self._socket.recv,
            self._socket.settimeout,
        )

    @property
    def _closed(self) -> bool:
        return self._socket.fileno() < 0

    def close(self) -> None:
        """Close the connection and end the command."""
        self._socket.close()
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait()


@contextmanager
def _bounded(
    transport: paramiko.Transport, seconds: float, label: str, what: str
) -> Iterator[None]:
    """Close the connection if a phase takes too long.

    paramiko waits for some answers without a timeout.

    Raises:
        HostError: the phase took longer than `seconds`.
    """
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        transport.close()

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        if expired.is_set():
            raise HostError(label, f"{what} within {seconds:g} s") from error
        raise
    finally:
        timer.cancel()
    if expired.is_set():
        raise HostError(label, f"{what} within {seconds:g} s")


def _text(error: BaseException) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)
