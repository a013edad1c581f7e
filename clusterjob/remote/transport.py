"""The interface of a connection to a host; paramiko and OpenSSH implement it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from clusterjob.remote.ssh_config import Target

AUTO, PARAMIKO, OPENSSH = "auto", "paramiko", "openssh"
TRANSPORTS = (AUTO, PARAMIKO, OPENSSH)
DEFAULT_TIMEOUT = 10.0  # seconds for each phase


class DroppedError(Exception):
    """The server closed the connection before it sent anything, as beyond MaxStartups."""


@dataclass(frozen=True)
class ConnectOptions:
    """Options of all connections of one pool.

    Attributes:
        timeout: seconds for each phase of a connection, unless ConnectTimeout is configured.
        warn: called with each line that the user should see.
        ssh_config: a configuration file that replaces the user's.
        transport: one of `TRANSPORTS`.
    """

    timeout: float = DEFAULT_TIMEOUT
    warn: Callable[[str], None] = lambda _: None
    ssh_config: Path | None = None
    transport: str = AUTO

    def seconds(self, target: Target) -> float:
        """Return the time limit of each phase of a host's connection."""
        return target.connect_timeout or self.timeout


def login_hint(target: Target) -> str:
    """Return the hint for a host that asks for a password or a code."""
    return f"log in once before, on a terminal: clusterjob login {target.label}"


class ByteStream(Protocol):
    """A byte stream, such as a socket."""

    def recv(self, size: int, /) -> bytes:
        """Return some bytes; empty at the end.

        Raises:
            TimeoutError: no byte arrives within the timeout.
            OSError: the connection broke.
        """
        ...

    def send(self, data: bytes, /) -> int:
        """Send some of the bytes and return how many.

        Raises:
            TimeoutError: the other side accepts no byte within the timeout.
            OSError: the connection broke.
        """
        ...

    def settimeout(self, seconds: float, /) -> None:
        """Set the timeout of the next calls."""
        ...

    def close(self) -> None:
        """Close the stream."""
        ...


class Channel(ByteStream, Protocol):
    """A command on a host: `send` writes to its stdin, `recv` reads its stdout."""

    @property
    def closed(self) -> bool:
        """Whether the command has ended or the channel is closed, as far as known."""
        ...

    def shutdown_write(self) -> None:
        """Close the command's stdin."""
        ...

    def read_stderr(self) -> bytes:
        """Return what arrived on stderr since the last call, without waiting; may be cut."""
        ...

    def wait_for_exit(self) -> int:
        """Return the command's exit code, once its stdout has been read to the end.

        Raises:
            TimeoutError: the command does not end within the timeout.
        """
        ...


class Connection(Protocol):
    """A verified connection that is logged in."""

    @property
    def target(self) -> Target:
        """The host with its ssh configuration."""
        ...

    @property
    def alive(self) -> bool:
        """Whether the connection is open, as far as known."""
        ...

    def execute(self, command: str) -> Channel:
        """Start a command without a terminal.

        Raises:
            HostError: the host does not start the command in time.
        """
        ...

    def forward(self, hostname: str, port: int) -> ByteStream:
        """Return a stream through this host to a TCP port (direct-tcpip).

        Raises:
            HostError: this host cannot reach the other one in time.
        """
        ...

    def close(self) -> None:
        """Close the connection."""
        ...
