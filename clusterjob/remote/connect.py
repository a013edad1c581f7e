"""One SSH connection: connect, verify the host key and log in, each with a timeout.

Without a timeout for each phase, a host that accepts TCP and then sends nothing would block its
caller forever; OpenSSH itself waits more than a minute for one. Each failure is a one-line error.
"""

from __future__ import annotations

import logging
import random
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import paramiko
from paramiko.message import Message

from clusterjob.errors import HostError
from clusterjob.remote import auth, host_certificates, known_hosts, revocation
from clusterjob.remote.known_hosts import HostKeyStatus, KnownHosts, fingerprint
from clusterjob.remote.ssh_config import Target
from clusterjob.remote.transport import Transport

# Without a handler, paramiko prints a traceback for each refused connection.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").propagate = False

DEFAULT_TIMEOUT = 10.0  # seconds for each phase
_TRIES = 6  # for a server that drops connections because of MaxStartups
_FIRST_PAUSE = 0.15  # seconds before the second try; doubled, with jitter, for each later one
# Milliseconds without an acknowledgement after which the kernel closes a connection.
_TCP_USER_TIMEOUT = 8000


class _DroppedError(Exception):
    """The server closed the connection before it sent anything: it has too many connections."""


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


@dataclass(frozen=True)
class HostKey:
    """The key that a host presents.

    Attributes:
        kind: its type.
        blob: its bytes.
        certificate: its certificate; None if it has none.
        shown: the bytes of the certificate.
    """

    kind: str
    blob: bytes
    certificate: host_certificates.Certificate | None = None
    shown: bytes = b""


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
            HostError: the host does not start it in time.
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

    def run(self, command: str, data: bytes = b"") -> tuple[int, bytes, bytes]:
        """Run a command to its end; return its exit code, stdout and stderr.

        Args:
            command: a line for the host's shell.
            data: its stdin.

        Raises:
            HostError: the host does not start it, or it prints nothing for the timeout.
        """
        channel = self.execute(command)
        try:
            channel.sendall(data)
            channel.shutdown_write()
            out, err = bytearray(), bytearray()
            while data := channel.recv(1 << 16):
                out += data
            while data := channel.recv_stderr(1 << 16):
                err += data
            return channel.recv_exit_status(), bytes(out), bytes(err)
        except (TimeoutError, OSError) as error:
            raise HostError(
                self.target.label, f"a command prints nothing for {self._timeout:g} s"
            ) from error
        finally:
            channel.close()

    def forward(self, hostname: str, port: int) -> paramiko.Channel:
        """Return a channel through this host to another (direct-tcpip).

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
        transport = None
        try:
            transport, key = _handshake(
                target,
                timeout,
                through=through,
                known=KnownHosts((*target.known_hosts, *target.system_known_hosts)),
            )
            _verify(target, key, options=options)
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
        HostError: the host is not reached.
    """
    known = KnownHosts((*target.known_hosts, *target.system_known_hosts))
    try:
        transport, key = _handshake(
            target, target.connect_timeout or options.timeout, through=through, known=known
        )
    except _DroppedError as error:
        raise HostError(target.label, "it closed the connection before it sent anything") from error
    transport.close()
    return key


def _handshake(
    target: Target, timeout: float, through: Connection | None, known: KnownHosts
) -> tuple[paramiko.Transport, HostKey]:
    sock = _socket(target, timeout, through=through)
    try:
        transport = Transport(sock)
    except BaseException:
        sock.close()
        raise
    try:
        transport.banner_timeout = timeout
        transport.auth_timeout = timeout
        names = known_hosts.lookup_names(target.hostname, target.port, alias=target.key_alias)
        transport.get_security_options().key_types = _key_types(transport, known, names=names)
        done = threading.Event()
        # Twice the timeout: paramiko bounds the wait for the banner by banner_timeout.
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


def _key_types(
    transport: paramiko.Transport, known: KnownHosts, names: list[str]
) -> tuple[str, ...]:
    """Return the host key types to request.

    Certificates come first if known_hosts has an authority for the host, then the types of known
    keys, then the others.
    """
    plain = [
        kind
        for kind in transport.get_security_options().key_types
        if not kind.endswith(host_certificates.SUFFIX)
    ]
    kinds = set(known.kinds(names))
    wanted = [kind for kind in plain if ("ssh-rsa" if kind.startswith("rsa-") else kind) in kinds]
    vouched = (
        [f"{kind}{host_certificates.SUFFIX}" for kind in plain]
        if known.has_authority(names)
        else []
    )
    return (*vouched, *wanted, *(kind for kind in plain if kind not in wanted))


def refuse_revoked(target: Target, key: HostKey) -> None:
    """Refuse a host key that RevokedHostKeys revokes.

    Raises:
        HostError: it is revoked, or a file of RevokedHostKeys cannot be read.
    """
    if key.certificate is None:
        why = revocation.objection(target.revoked_keys, key.kind, shown=key.blob, related=())
    else:
        kind = f"{key.kind}{host_certificates.SUFFIX}"
        why = revocation.objection(
            target.revoked_keys,
            kind,
            shown=key.shown,
            related=(key.blob, key.certificate.authority),
        )
    if why:
        raise HostError(
            target.label, why, hint="RevokedHostKeys of the ssh configuration names the file"
        )


def _verify(target: Target, key: HostKey, options: ConnectOptions) -> None:
    """Check a host key against RevokedHostKeys, known_hosts and StrictHostKeyChecking.

    Raises:
        HostError: it is not trusted.
    """
    refuse_revoked(target, key)
    known = KnownHosts((*target.known_hosts, *target.system_known_hosts))
    names = known_hosts.lookup_names(target.hostname, target.port, alias=target.key_alias)
    if key.certificate is not None:
        authority = key.certificate.authority
        if place := known.revoked(names, authority):
            raise HostError(
                target.label,
                f"the authority that signed its key is revoked ({place})",
                hint="this host is not to be trusted",
            )
        if known.authority(names, authority):
            why = host_certificates.objection(
                key.certificate, (target.key_alias or target.hostname).lower(), verify=_signed_by
            )
            if why:
                raise HostError(target.label, f"the certificate of its key is not valid: {why}")
            if place := known.revoked(names, key.blob):
                raise HostError(
                    target.label,
                    f"its key is revoked ({place})",
                    hint="this host is not to be trusted",
                )
            return
    status, place = known.status(names, key.blob)
    if status is HostKeyStatus.KNOWN:
        return
    shown = f"{key.kind} {fingerprint(key.blob)}"
    if status is HostKeyStatus.REVOKED:
        raise HostError(
            target.label,
            f"its key {shown} is revoked ({place})",
            hint="this host is not to be trusted",
        )
    trust = f"clusterjob hosts trust {target.label}"
    if target.strict == "no":
        what = (
            "is unknown" if status is HostKeyStatus.UNKNOWN else f"differs from the one in {place}"
        )
        options.warn(
            f"{target.label}: its key {shown} {what}; used because StrictHostKeyChecking is `no`"
        )
        if status is HostKeyStatus.UNKNOWN:
            remember(target, key)
        return
    if status is HostKeyStatus.CHANGED:
        raise HostError(
            target.label,
            f"its key has changed: it shows {shown}, another one is in {place}",
            hint=f"if the change is intended: {trust} --replace",
        )
    if target.strict == "accept-new":
        remember(target, key)
        return
    raise HostError(
        target.label,
        f"its key is unknown: {shown}",
        hint=f"compare it with the key on the host, then: {trust}",
    )


def remember(target: Target, key: HostKey) -> Path | None:
    """Record a host key in the user's first known_hosts file.

    Returns:
        The file; None if UserKnownHostsFile is `none`.

    Raises:
        HostError: the file cannot be written.
    """
    if not target.known_hosts:
        return None
    path = target.known_hosts[0]
    name = known_hosts.lookup_names(target.hostname, target.port, alias=target.key_alias)[0]
    try:
        known_hosts.record(path, name, kind=key.kind, blob=key.blob, hashed=target.hash_names)
    except OSError as error:
        raise HostError(
            target.label, f"its key cannot be recorded in {path}: {error.strerror}"
        ) from error
    return path


def _signed_by(authority: bytes, signature: bytes, data: bytes) -> bool:
    try:
        kind = Message(authority).get_text()
        key = paramiko.PKey.from_type_string(key_type=kind, key_bytes=authority)
        return bool(key.verify_ssh_sig(data, Message(signature)))
    except (paramiko.SSHException, ValueError):
        return False


def _text(error: BaseException) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)
