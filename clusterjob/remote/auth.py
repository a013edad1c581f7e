"""Public key authentication as ssh does it: keys of the agent, of files, and certificates.

It never prompts for a password or a passphrase.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import paramiko
from paramiko.agent import AgentSSH

from clusterjob.errors import HostError
from clusterjob.remote.ssh_config import Target


class _Agent(AgentSSH):
    """The ssh agent at a socket (IdentityAgent or SSH_AUTH_SOCK)."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(10)
            self._socket.connect(path)
            # paramiko's own Agent calls this method too.
            self._connect(self._socket)  # type: ignore[attr-defined]
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def log_in(
    target: Target, transport: paramiko.Transport, bound: Callable[[], AbstractContextManager[None]]
) -> None:
    """Log in on a connection whose host key is trusted.

    Args:
        target: gives the user name and the keys to try.
        transport: the connection.
        bound: returns a context manager that limits the time of one try.

    Raises:
        HostError: the host accepts none of the keys.
    """
    tried: list[str] = []
    problems: list[str] = []
    agent = _agent(target)
    try:
        for name, key in _keys(target, agent, problems=problems):
            try:
                with bound():
                    left = transport.auth_publickey(target.user, key)
            except paramiko.BadAuthenticationType as error:
                raise HostError(
                    target.label,
                    f"it accepts no public key from {target.user}, only "
                    f"{', '.join(error.allowed_types)}",
                ) from error
            except paramiko.AuthenticationException:
                tried.append(name)
                continue
            except (paramiko.SSHException, OSError, EOFError) as error:
                if not transport.is_active():
                    why = f"it closed the connection after {len(tried) + 1} keys of {target.user}"
                    raise HostError(
                        target.label,
                        why,
                        hint="set IdentitiesOnly yes in the ssh configuration to offer fewer keys",
                    ) from error
                problems.append(f"{name}: {error}")
                continue
            if not left:
                return
            raise HostError(
                target.label, f"it requires more than a key from {target.user}: {', '.join(left)}"
            )
    finally:
        if agent is not None:
            agent.close()
    what = f"there is no key to log in with as {target.user}"
    if tried:
        what = f"it accepts none of the keys of {target.user}: {', '.join(tried)}"
    raise HostError(
        target.label,
        "; ".join([what, *problems]),
        hint=f"make `ssh {target.label}` work without a password",
    )


def _agent(target: Target) -> _Agent | None:
    if not target.agent or not os.path.exists(target.agent):
        return None
    try:
        return _Agent(target.agent)
    except (OSError, paramiko.SSHException):
        return None


def _keys(
    target: Target, agent: _Agent | None, problems: list[str]
) -> Iterator[tuple[str, paramiko.PKey]]:
    """Yield (name, key) in ssh's order.

    The order: the agent's keys that are also configured, its other keys, the keys in files.
    """
    held = {key.asbytes(): key for key in agent.get_keys()} if agent is not None else {}
    configured = {blob for path in target.identities if (blob := _public(path))}
    certificates = [path for path in target.certificates if path.is_file()]
    others = [] if target.identities_only else [blob for blob in held if blob not in configured]
    for blob in [*(blob for blob in held if blob in configured), *others]:
        yield f"{held[blob].comment or held[blob].get_name()} of the agent", held[blob]
    for path in target.identities:
        if not path.is_file() or (_public(path) or b"") in held:
            continue
        key = _load(path, problems)
        if key is None:
            continue
        for certificate in certificates:
            plain = key.public_blob
            try:
                key.load_certificate(str(certificate))
            except (ValueError, paramiko.SSHException):
                continue
            yield str(certificate), key
            key.public_blob = plain
        yield str(path), key


def _public(path: Path) -> bytes | None:
    """Return the public key from the .pub file next to a key file; None if there is none."""
    try:
        return paramiko.pkey.PublicBlob.from_file(f"{path}.pub").key_blob
    except (OSError, ValueError, IndexError):
        return None


def _load(path: Path, problems: list[str]) -> paramiko.PKey | None:
    try:
        return paramiko.PKey.from_path(path)
    except (paramiko.PasswordRequiredException, TypeError):  # TypeError: raised by cryptography
        problems.append(f"{path} has a passphrase and no agent holds it (ssh-add)")
    except (OSError, ValueError, paramiko.SSHException) as error:
        problems.append(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}")
    except Exception as error:
        # UnknownKeyType, or any error that cryptography raises for a key type it does not know.
        problems.append(f"{path} cannot be used: {type(error).__name__}")
    return None
