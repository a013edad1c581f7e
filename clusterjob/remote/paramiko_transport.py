"""A connection with paramiko: connect, verify the host key and log in, each with a timeout.

A host may accept TCP and then send nothing: without these timeouts its caller would wait forever.
Each failure is a one-line error.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
from functools import partial
from typing import Any, ClassVar

import paramiko
from paramiko.auth_handler import AuthHandler
from paramiko.common import DEFAULT_WINDOW_SIZE, MSG_CHANNEL_DATA, MSG_CHANNEL_EXTENDED_DATA

from clusterjob.errors import HostError
from clusterjob.node.system.sanitize import sanitize
from clusterjob.remote import auth, host_keys
from clusterjob.remote.host_keys import HostKey
from clusterjob.remote.phase import Phase
from clusterjob.remote.process_channel import ProcessChannel
from clusterjob.remote.ssh_config import Target
from clusterjob.remote.transport import (
    PARAMIKO,
    Connection,
    ConnectOptions,
    DroppedError,
    login_hint,
)

# Without a handler, paramiko prints a traceback for each refused connection.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").propagate = False

# Milliseconds without an acknowledgement after which the kernel closes a connection.
_TCP_USER_TIMEOUT = 8000
_MAX_UNREAD = 2 * DEFAULT_WINDOW_SIZE  # maximum unread bytes of one channel


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

    def auth_interactive(self, username: str, handler: Any, submethods: str = "") -> list[str]:
        """Like paramiko's method, with a limit of the questions that a host may ask at once."""
        event = threading.Event()
        self.auth_handler: Any = _BoundedAuthHandler(self)
        self.auth_handler.auth_interactive(username, handler, event, submethods)
        return self.auth_handler.wait_for_response(event)


class _BoundedAuthHandler(AuthHandler):
    """paramiko's handler reads as many questions as the host announces, up to 2**32."""

    def _parse_userauth_info_request(self, message: Any) -> None:
        begin = message.packet.tell()
        for _ in range(3):  # title, instructions, language
            message.get_binary()
        if message.get_int() > auth.MAX_QUESTIONS:
            raise paramiko.SSHException("the host asks too many questions at once")
        message.packet.seek(begin)
        super()._parse_userauth_info_request(message)  # type: ignore[misc]


class ParamikoChannel:
    """A command on a host."""

    def __init__(self, channel: paramiko.Channel, timeout: float) -> None:
        self.raw = channel
        self.recv, self.settimeout = channel.recv, channel.settimeout
        self.shutdown_write, self.close = channel.shutdown_write, channel.close
        self._timeout = timeout
        channel.settimeout(timeout)

    @property
    def closed(self) -> bool:
        """Whether the channel is closed, as far as paramiko knows."""
        return self.raw.closed

    def send(self, data: bytes) -> int:
        """Send some of the bytes and return how many."""
        try:
            return self.raw.send(data)
        except paramiko.SSHException as error:
            raise ConnectionError(str(error)) from error

    def read_stderr(self) -> bytes:
        """Return what arrived on stderr since the last call."""
        try:
            return self.raw.recv_stderr(1 << 16) if self.raw.recv_stderr_ready() else b""
        except OSError:
            return b""

    def wait_for_exit(self) -> int:
        """Return the command's exit code."""
        if not self.raw.status_event.wait(self._timeout):
            raise TimeoutError
        return int(self.raw.recv_exit_status())


class ParamikoConnection:
    """A verified connection that is logged in."""

    def __init__(self, target: Target, transport: paramiko.Transport, timeout: float) -> None:
        self.target = target
        self._transport = transport
        self._timeout = timeout

    @property
    def alive(self) -> bool:
        """Whether the connection is open, as far as paramiko knows."""
        return self._transport.is_active()

    def execute(self, command: str) -> ParamikoChannel:
        """Start a command without a terminal and return its channel.

        Raises:
            HostError: the host does not start the command in time.
        """
        try:
            with Phase(
                self._transport.close,
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
        return ParamikoChannel(channel, self._timeout)

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
) -> ParamikoConnection:
    """Return a connection to a host, verified and logged in; see `clusterjob.remote.connect`."""
    timeout = options.seconds(target)
    # With transport = paramiko, the connection of `clusterjob login` is not used.
    before = 'set transport = "auto"; ' if options.transport == PARAMIKO else ""
    transport, key = _handshake(target, timeout, through=through)
    try:
        host_keys.verify(target, key, warn=options.warn)
        auth.log_in(
            target,
            transport,
            bound=partial(
                Phase, transport.close, timeout, target.label, "it does not answer the login"
            ),
            login_hint=before + login_hint(target),
        )
        transport.set_keepalive(15)
    except BaseException:
        transport.close()
        raise
    return ParamikoConnection(target, transport, timeout=timeout)


def host_key(target: Target, options: ConnectOptions, through: Connection | None) -> HostKey:
    """Return the key that a host presents, trusted or not, without logging in.

    Raises:
        HostError: the host cannot be reached.
        DroppedError: it closed the connection before it sent anything.
    """
    transport, key = _handshake(target, options.seconds(target), through=through)
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
        with Phase(
            transport.close,
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
        return transport, HostKey(shown.get_name(), shown.asbytes())
    except (paramiko.SSHException, OSError, EOFError) as error:
        _hang_up(transport)
        text = sanitize(_text(error))
        if isinstance(error, paramiko.SSHException):
            error.args = (text,)  # a traceback shows the cause too
        if "banner" in text and isinstance(error.__context__, TimeoutError):
            raise HostError(
                target.label, f"it accepts TCP and sends nothing for {timeout:g} s"
            ) from error
        if "banner" in text or isinstance(error, (EOFError, ConnectionError)):
            raise DroppedError from error
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
        return ProcessChannel(["/bin/sh", "-c", f"exec {target.proxy_command}"], timeout)
    where = f"{target.hostname}:{target.port}"
    steps = f"`ssh -v {target.label}` shows each step"
    try:
        sock = socket.create_connection((target.hostname, target.port), timeout)
    except TimeoutError as error:
        why = f"no answer from {where} within {timeout:g} s"
        raise HostError(target.label, why, hint=steps) from error
    except socket.gaierror as error:
        why = f"unknown host {target.hostname}: {error.strerror}"
        raise HostError(target.label, why, hint=steps) from error
    except (OSError, UnicodeError) as error:
        raise HostError(target.label, f"{_text(error).lower()} ({where})", hint=steps) from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":  # elsewhere the timeout of a request ends a cut connection
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TCP_USER_TIMEOUT)
    return sock


def _text(error: BaseException) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)
