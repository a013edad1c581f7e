"""Connect to a host with paramiko or OpenSSH, whichever fits the host."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from clusterjob.errors import HostError
from clusterjob.remote import control_master, host_keys
from clusterjob.remote.known_hosts import CERT_AUTHORITY
from clusterjob.remote.ssh_config import Target
from clusterjob.remote.transport import (
    OPENSSH,
    PARAMIKO,
    Connection,
    ConnectOptions,
    DroppedError,
)

_TRIES = 6  # attempts to connect to a server that drops connections (MaxStartups)
_FIRST_PAUSE = 0.15  # seconds before the second try; doubled, with jitter, for each later one
_TIMEOUT = 5.0  # seconds for klist


# Returns the connection to a host's bastion with a transport; None if it needs none.
Through = Callable[[str], Connection | None]


def connect(
    target: Target,
    options: ConnectOptions,
    through: Through,
) -> Connection:
    """Return a connection to a host, verified and logged in.

    Args:
        target: the host's address, user and keys.
        options: transport, timeout and warnings.
        through: returns the connection to the bastion.

    Raises:
        HostError: the host cannot be used. A host whose key is not trusted gets no credentials.
    """
    connect_once = _connector(target, options, through=through)
    pause = _FIRST_PAUSE
    for attempt in range(_TRIES):
        try:
            return connect_once()
        except DroppedError as error:
            if attempt == _TRIES - 1:
                raise HostError(
                    target.label,
                    f"it closed the connection {_TRIES} times before it sent anything",
                    hint="too many connections at once (MaxStartups), or the port is not sshd's",
                ) from error
            time.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311 - jitter
            pause *= 2
    raise AssertionError


def _connector(
    target: Target, options: ConnectOptions, through: Through
) -> Callable[[], Connection]:
    opened = control_master.find(target) if options.transport != PARAMIKO else None
    if opened is not None or needs_openssh(target, options):
        from clusterjob.remote import openssh_transport

        if opened is not None:
            return lambda: openssh_transport.share(target, options, opened)
        return lambda: openssh_transport.connect(target, options, lambda: through(OPENSSH))
    with _without_invoke():
        from clusterjob.remote import paramiko_transport

    return lambda: paramiko_transport.connect(target, options, through=through(options.transport))


@contextlib.contextmanager
def _without_invoke() -> Iterator[None]:
    """Let paramiko be imported without invoke, which takes a third of the time.

    paramiko needs it for `Match exec` alone; `ssh_config` reads such lines before.
    """
    hidden = "invoke" not in sys.modules and "paramiko" not in sys.modules
    if hidden:
        sys.modules["invoke"] = None  # type: ignore[assignment]  # an import fails
    try:
        yield
    finally:
        if hidden:
            sys.modules.pop("invoke", None)


def host_key(target: Target, options: ConnectOptions, through: Through) -> host_keys.HostKey:
    """Return the key that a host presents, trusted or not, without logging in.

    Raises:
        HostError: the host cannot be reached, or RevokedHostKeys names its key.
    """
    try:
        if needs_openssh(target, options):
            from clusterjob.remote import openssh_transport

            return openssh_transport.host_key(target, options, through(OPENSSH))
        with _without_invoke():
            from clusterjob.remote import paramiko_transport

        bastion = through(options.transport)
        return paramiko_transport.host_key(target, options, through=bastion)
    except DroppedError as error:
        raise HostError(target.label, "it closed the connection before it sent anything") from error


def needs_openssh(target: Target, options: ConnectOptions) -> bool:
    """Return whether a new connection to a host is made with OpenSSH.

    Raises:
        HostError: it must be, but there is no ssh command or the transport is paramiko.
    """
    required = _required(target)
    if options.transport == PARAMIKO:
        if target.revoked_keys:
            raise HostError(
                target.label,
                "paramiko does not check RevokedHostKeys",
                hint='set transport = "auto", or "openssh"',
            )
        return False
    has_ssh = shutil.which("ssh") is not None
    if options.transport == OPENSSH:
        required = required or "transport = openssh"
    if required and not has_ssh:
        raise HostError(
            target.label,
            f"{required} needs the command ssh, which is not installed",
            hint="install openssh-client",
        )
    return has_ssh and bool(required or _preferred(target))


def _required(target: Target) -> str:
    """Return what a host needs and paramiko lacks; empty if nothing."""
    if target.revoked_keys:
        return "RevokedHostKeys"
    if target.other_needs:
        return target.other_needs[0]
    if host_keys.known_keys(target).marked(host_keys.lookup_names(target), CERT_AUTHORITY):
        return "the host's certificate (@cert-authority)"
    return ""


def _preferred(target: Target) -> bool:
    """Return whether the user's configuration is meant for OpenSSH."""
    return bool(
        target.control_path
        or (target.gssapi and _has_ticket(os.environ.get("KRB5CCNAME", "")))
        or any(_is_fido(path) for path in target.identities)
    )


def _is_fido(key: Path) -> bool:
    """Return whether a key is on a FIDO token; its public part says so."""
    try:
        with open(f"{key}.pub", "rb") as stream:
            return stream.read(3) == b"sk-"
    except OSError:
        return False


@functools.lru_cache(maxsize=8)
def _has_ticket(_cache_name: str) -> bool:
    """Return whether the user has a valid Kerberos ticket.

    Debian's ssh_config sets GSSAPIAuthentication for everyone, so this decides.
    """
    try:
        return (
            subprocess.run(
                ["klist", "-s"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_TIMEOUT,
                check=False,
            ).returncode
            == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
