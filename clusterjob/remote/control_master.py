"""Shared connections of OpenSSH (ControlMaster): find, check and close them.

A shared connection is a socket; any ssh process that names it uses the connection, and its login.
Source: ssh_config(5), ControlPath and ControlPersist.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clusterjob.core.state_home import home
from clusterjob.errors import HostError, os_error_text
from clusterjob.node.system import private_dirs
from clusterjob.remote.ssh_config import Target

# A socket's path has at most 104 bytes on macOS, 108 on Linux. ssh adds 17 characters at first.
_MAX_PATH = 104 - 18
_TIMEOUT = 5.0  # seconds for an answer of ssh on this machine
_OTHER_DIRECTORY = "set XDG_RUNTIME_DIR to a private directory with a short name"
_PAUSE = 0.1  # seconds between two tries to get a lock


def client(path: Path, *options: str) -> list[str]:
    """Return the start of a command that uses the shared connection at a path, and no other.

    The host's name follows. The user's configuration concerns the connection, which exists, so
    none is read. ProxyCommand runs only if the shared connection is gone.
    """
    return [
        "ssh",
        *("-F", "none", "-T"),
        *settings(
            BatchMode="yes",
            ControlMaster="no",
            ControlPath=str(path).replace("%", "%%"),
            LogLevel="ERROR",
            ProxyCommand="false",
        ),
        *options,
        "--",
    ]


def find(target: Target) -> Path | None:
    """Return the socket of the user's open connection to a host; None if there is none."""
    return next((path for path in _candidates(target) if is_open(path)), None)


def _candidates(target: Target) -> Iterator[Path]:
    if target.control_path:
        yield Path(target.control_path)
    for directory in filter(_is_private, _directories()):
        yield directory / _name(target)


def path_for_login(target: Target) -> Path:
    """Return the socket for a new shared connection: the user's ControlPath, or our own.

    Raises:
        HostError: no directory for it can be made.
    """
    return Path(target.control_path) if target.control_path else _own(target, _name(target))


@contextmanager
def alone(target: Target, path: Path, seconds: float) -> Iterator[None]:
    """Let one process at a time open the shared connection at a path; remove a dead socket.

    ssh opens a connection that nobody can share or close if there is a socket at the path.

    Raises:
        HostError: another process has been opening the connection for so many seconds, or the
            file of the lock cannot be made.
    """
    end = time.monotonic() + seconds
    try:
        lock = open(_own(target, f"{_name(target)}.lock"), "wb")  # noqa: SIM115
    except OSError as error:
        why = f"its connection cannot be opened: {os_error_text(error)}"
        raise HostError(target.label, why, hint=_OTHER_DIRECTORY) from error
    with lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > end:
                    why = "another command is logging in, and waits for an answer"
                    raise HostError(target.label, why) from error
                time.sleep(_PAUSE)
        if _is_own_socket(path) and not is_open(path):
            path.unlink(missing_ok=True)
        yield


def private_path(target: Target) -> Path:
    """Return the socket for a connection of this process alone.

    Raises:
        HostError: no directory for it can be made.
    """
    return _own(target, f"{os.getpid():x}-{secrets.token_hex(4)}")


def is_open(path: Path) -> bool:
    """Return whether a shared connection of this user answers at a path."""
    return _is_own_socket(path) and _succeeds(_control(path, "check"))


def _is_own_socket(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid()


def close(*paths: Path) -> None:
    """Close shared connections, and all commands on them."""
    asked = [_control(path, "exit") for path in paths]
    for process in asked:
        _succeeds(process)


def _control(path: Path, word: str) -> subprocess.Popen[bytes] | None:
    try:
        return subprocess.Popen(
            [*client(path, "-O", word), "clusterjob"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return None


def _succeeds(process: subprocess.Popen[bytes] | None) -> bool:
    if process is None:
        return False
    try:
        return process.wait(_TIMEOUT) == 0
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False


def _own(target: Target, name: str) -> Path:
    why = "each path is too long for a socket"
    for directory in _directories():
        if len(os.fsencode(directory / name)) > _MAX_PATH:
            continue
        try:
            private_dirs.make(directory)
        except OSError as error:
            why = f"{directory}: {error.strerror}"
            continue
        if _is_private(directory):
            return directory / name
        why = f"{directory} is not a private directory (mode 0700)"
    raise HostError(
        target.label,
        f"there is no directory for the socket of its connection: {why}",
        hint=_OTHER_DIRECTORY,
    )


def _is_private(directory: Path) -> bool:
    """Return whether a path is a directory, no link, that only this user may open."""
    try:
        status = directory.lstat()
    except OSError:
        return False
    own = status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode)
    return own and stat.S_IMODE(status.st_mode) == 0o700


def _directories() -> Iterator[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isabs(runtime):
        yield Path(runtime) / "clusterjob"
    yield home() / "ssh"
    yield Path(f"/tmp/clusterjob-{os.geteuid()}")  # noqa: S108 - only if it is private


def _name(target: Target) -> str:
    """Return a name that no host with another address, user or route has."""
    parts = (
        target.hostname,
        str(target.port),
        target.user,
        ",".join(map(str, target.jumps)),
        target.proxy_command,
        target.key_alias,
    )
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:20]


def settings(**options: str) -> list[str]:
    """Return options of the command line of ssh."""
    return [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
