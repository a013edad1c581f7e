"""A connection with OpenSSH: `ssh` logs in, and each command is an `ssh` on that connection.

So everything that ssh supports applies: ControlMaster, GSSAPI, FIDO keys, PKCS#11, host
certificates, RevokedHostKeys, and every option of the user's configuration.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from clusterjob.core.live import live
from clusterjob.errors import HostError, escaped
from clusterjob.remote import control_master, known_hosts
from clusterjob.remote.host_keys import HostKey, known_keys, lookup_names
from clusterjob.remote.known_hosts import REVOKED
from clusterjob.remote.process_channel import ProcessChannel
from clusterjob.remote.ssh_config import Target
from clusterjob.remote.terminal_prompt import HUMAN_TIMEOUT
from clusterjob.remote.transport import Connection, ConnectOptions, DroppedError, login_hint

_LOGIN_TIMEOUTS = 4  # time limit of a login, as a multiple of the timeout; as paramiko's phases
_IDLE = 20  # seconds after which ssh closes the connection of a process that was killed
LOGIN_IDLE = 8 * 3600  # the same, of a connection that `clusterjob login` opened
_MAX_ERROR = 300  # characters of an error of ssh
# A login must be private to us: nothing that the user's configuration adds to an interactive one.
_CONNECTION_ONLY = {
    "ClearAllForwardings": "yes",
    "ConnectionAttempts": "1",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "RequestTTY": "no",
    "ServerAliveCountMax": "2",
    "ServerAliveInterval": "5",
    "Tunnel": "no",
}
_WITHOUT_QUESTIONS = {"BatchMode": "yes", "LogLevel": "ERROR"}

_to_close: set[Path] = set()  # connections of this process alone


@atexit.register
def _close_all() -> None:
    """Close the connections that are still open when the program ends."""
    control_master.close(*_to_close)


class OpenSshConnection:
    """A shared connection of ssh.

    Args:
        target: the host.
        path: the connection's socket.
        timeout: seconds for an answer.
    """

    def __init__(self, target: Target, path: Path, timeout: float) -> None:
        self.target = target
        self.path = path
        self._timeout = timeout

    @property
    def alive(self) -> bool:
        """Whether the connection is open: ssh removes its socket at the end."""
        return self.path.exists()

    def client(self, *options: str) -> list[str]:
        """Return the start of a command of ssh on this connection; a remote command may follow."""
        return [*control_master.client(self.path, *options), self.target.hostname]

    def execute(self, command: str) -> ProcessChannel:
        """Start a command without a terminal and return its channel."""
        return self._start([*self.client(), command])

    def forward(self, hostname: str, port: int) -> ProcessChannel:
        """Return a stream through this host to another host (direct-tcpip)."""
        where = f"[{hostname}]:{port}" if ":" in hostname else f"{hostname}:{port}"
        return self._start(self.client("-W", where))

    def close(self) -> None:
        """Close the connection, unless it is shared with other commands."""
        if self.path in _to_close:
            _to_close.discard(self.path)
            control_master.close(self.path)

    def _start(self, argv: Sequence[str]) -> ProcessChannel:
        try:
            return ProcessChannel(argv, self._timeout)
        except OSError as error:
            raise HostError(
                self.target.label, f"ssh cannot be started: {error.strerror}"
            ) from error


def share(target: Target, options: ConnectOptions, path: Path) -> OpenSshConnection:
    """Return an open connection of the user; see `control_master.find`."""
    return OpenSshConnection(target, path, options.seconds(target))


def connect(
    target: Target, options: ConnectOptions, through: Callable[[], Connection | None]
) -> OpenSshConnection:
    """Return a new connection to a host; see `clusterjob.remote.connect.connect`.

    With ControlPersist, ssh keeps it for later commands at the user's ControlPath.

    Args:
        target: the host.
        options: timeout and warnings.
        through: returns the connection to the bastion.
    """
    timeout = options.seconds(target)
    if target.strict == "no":
        options.warn(
            f"{target.label}: its key is not verified because StrictHostKeyChecking is `no`"
        )
    if target.control_path and target.persists:
        # It outlives our connection to a bastion, so ssh makes its own one there.
        path = Path(target.control_path)
        with control_master.alone(target, path, _LOGIN_TIMEOUTS * timeout):
            if not control_master.is_open(path):
                _open(target, path, timeout, {})
        return share(target, options, path)
    connection = share(target, options, control_master.private_path(target))
    _to_close.add(connection.path)
    try:
        more = {"ControlPersist": str(_IDLE), **_proxy(through())}
        _open(target, connection.path, timeout, more)
    except BaseException:
        connection.close()
        raise
    return connection


def log_in(
    target: Target, connect_options: ConnectOptions, *, terminal: bool, bastion: Connection | None
) -> None:
    """Open the shared connection that later commands use; ssh asks on the terminal.

    Args:
        target: the host.
        connect_options: its timeout.
        terminal: whether a person can answer. If not, only a login without questions succeeds.
        bastion: a shared connection to the host's last bastion; None to let ssh make one.

    Raises:
        HostError: the login failed.
    """
    timeout = connect_options.seconds(target)
    path = control_master.path_for_login(target)
    more = {} if target.persists else {"ControlPersist": str(LOGIN_IDLE)}
    with control_master.alone(target, path, _LOGIN_TIMEOUTS * timeout):
        if not control_master.is_open(path):  # by a login meanwhile
            _open(target, path, timeout, {**more, **_proxy(bastion)}, terminal=terminal)


def host_key(target: Target, options: ConnectOptions, bastion: Connection | None) -> HostKey:
    """Return the key that a host presents, trusted or not, without logging in.

    Raises:
        HostError: the host cannot be reached, or RevokedHostKeys names its key.
    """
    timeout = options.seconds(target)
    with tempfile.TemporaryDirectory(prefix="clusterjob-") as directory:
        path = Path(directory) / "known_hosts"
        more = {"KnownHostsCommand": "none"} if target.other_needs else {}
        command = _command(
            target,
            timeout,
            **_WITHOUT_QUESTIONS,
            ControlPath="none",
            GlobalKnownHostsFile="/dev/null",
            HashKnownHosts="no",
            PreferredAuthentications="none",
            StrictHostKeyChecking="accept-new",
            UpdateHostKeys="no",
            UserKnownHostsFile=str(path),
            **more,
            **_proxy(bastion),
        )
        _, errors = _run([*command, "true"], _LOGIN_TIMEOUTS * timeout)
        found = known_hosts.read_keys(path)
    if not found:
        raise _failure(target, errors)
    return HostKey(*found[0])


def _open(
    target: Target, path: Path, timeout: float, more: Mapping[str, str], *, terminal: bool = False
) -> None:
    """Log in with an ssh that stays in the background, with more options.

    Raises:
        HostError: the login failed.
        DroppedError: the host closed the connection before it sent anything.
    """
    # `ask` would ask on the terminal; here `clusterjob hosts trust` records a new key.
    strict = "yes" if target.strict == "ask" else target.strict
    if strict == "no" and known_keys(target).marked(lookup_names(target), REVOKED):
        strict = "accept-new"  # with `no`, ssh uses even a revoked key
    seconds = HUMAN_TIMEOUT if terminal else _LOGIN_TIMEOUTS * timeout
    command = _command(
        target,
        timeout,
        "-f",
        "-N",
        **({} if terminal else _WITHOUT_QUESTIONS),
        ControlMaster="yes",
        ControlPath=str(path).replace("%", "%%"),
        StrictHostKeyChecking=strict,
        **more,
    )
    with live.suspended() if terminal else contextlib.nullcontext():
        code, errors = _run(command, seconds, terminal=terminal)
    if code is None:
        raise HostError(target.label, f"ssh does not log in within {seconds:g} s")
    if code == 0 and path.exists():
        return
    if terminal:
        trust = f"clusterjob hosts trust {target.label}"
        hint = f"ssh says why above; for an unknown key: {trust}"
        raise HostError(target.label, "ssh did not log in", hint=hint)
    raise _failure(target, errors)


def _command(target: Target, timeout: float, *flags: str, **options: str) -> list[str]:
    """Return the command that connects to a host with these options."""
    settings = control_master.settings(
        **_CONNECTION_ONLY, ConnectTimeout=str(max(1, round(timeout))), **options
    )
    return ["ssh", *flags, *settings, *target.arguments]


def _proxy(bastion: Connection | None) -> dict[str, str]:
    """Return the option that reaches a host through an open connection of ssh."""
    if bastion is None:
        return {}
    assert isinstance(bastion, OpenSshConnection)
    words = [word.replace("%", "%%") for word in control_master.client(bastion.path)[:-1]]
    command = shlex.join([*words, "-W", "[%h]:%p", "--", bastion.target.hostname])
    return {"ProxyCommand": command}


def _run(argv: Sequence[str], seconds: float, *, terminal: bool = False) -> tuple[int | None, str]:
    """Run ssh; return its exit code, None after the time limit, and what it wrote on stderr.

    With a terminal, ssh may ask there, and stderr is shown instead.
    """
    # A file, because an ssh in the background may keep a pipe open.
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                argv,
                stdin=None if terminal else subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if terminal else errors,
                start_new_session=not terminal,  # no access to the terminal
            )
        except OSError as error:
            return 255, f"ssh cannot be started: {error.strerror}"
        code: int | None = None
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if code is None:
                _kill(process, whole_session=not terminal)
        errors.seek(0)
        return code, errors.read(1 << 16).decode(errors="replace")


def _kill(process: subprocess.Popen[bytes], *, whole_session: bool) -> None:
    with contextlib.suppress(ProcessLookupError):
        if whole_session:  # with its ProxyCommand
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.terminate()  # ssh restores the terminal
    process.wait()


def _failure(target: Target, errors: str) -> Exception:
    """Return the error for what ssh wrote on stderr."""
    lines = [escaped(line.strip())[:_MAX_ERROR] for line in errors.splitlines() if line.strip()]
    if failure := _key_failure(target, lines):
        return failure
    if match := re.search(r"Permission denied \(([\w,@.-]*)\)", errors):
        why = f"ssh cannot log in as {target.user}: the host accepts only {match[1]}"
        hint = f"make `ssh {target.label}` work without a password"
        if {"keyboard-interactive", "password"} & set(match[1].split(",")):
            why = f"it requires an answer from {target.user}: {match[1]}"
            hint = login_hint(target)
        return HostError(target.label, why[:_MAX_ERROR], hint=hint)
    if not lines:
        hint = f"`ssh -v {target.label}` shows each step"
        return HostError(target.label, "ssh gives no reason", hint=hint)
    if line := _first(lines, "^unix_listener: "):
        hint = "make the directory of ControlPath in the ssh configuration"
        return HostError(target.label, line, hint=hint)
    last = lines[-1].removeprefix("ssh: ")
    if _first(lines, "^(kex|ssh)_exchange_identification"):
        return DroppedError()
    return HostError(target.label, last, hint=f"`ssh -v {target.label}` shows each step")


def _key_failure(target: Target, lines: Sequence[str]) -> HostError | None:
    """Return the error if ssh refused the host's key."""
    trust = f"clusterjob hosts trust {target.label}"
    why, hint = "", ""
    if line := _first(lines, "Error checking host key"):
        why = f"its key cannot be checked: {line}"
    elif line := _first(lines, "revoked|REVOKED"):
        file = line.partition(" by file ")[2]
        why = f"its key is revoked{f' ({file})' if file else ''}"
        hint = "this host is not to be trusted"
    elif _first(lines, "IDENTIFICATION HAS CHANGED"):
        place = _first(lines, "^Offending").partition(" in ")[2]
        why = f"its key has changed{f', another one is in {place}' if place else ''}"
        hint = f"if the change is intended: {trust} --replace"
    elif line := _first(lines, "^Certificate invalid"):
        why = f"the certificate of its key is not valid: {line.partition(': ')[2]}"
    elif _first(lines, "^Host key verification failed|host key is known for"):
        why = "its key is unknown"
        hint = f"compare it with the key on the host, then: {trust}"
    return HostError(target.label, why[:_MAX_ERROR], hint=hint) if why else None


def _first(lines: Sequence[str], pattern: str) -> str:
    """Return the first line in which a pattern is found; empty if there is none."""
    return next((line for line in lines if re.search(pattern, line)), "")
