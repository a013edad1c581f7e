"""Log in as ssh does: keys of the agent and of files, then questions on the terminal.

It never asks for a key's passphrase: ssh-agent holds such a key.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import paramiko
from paramiko.agent import AgentSSH

from clusterjob.errors import HostError
from clusterjob.node.system.sanitize import sanitize
from clusterjob.remote import terminal_prompt
from clusterjob.remote.phase import Phase
from clusterjob.remote.ssh_config import Target

MAX_QUESTIONS = 10  # questions that a host may ask at once
_MAX_ROUNDS = 10  # times that a host may ask within one try
_MAX_TEXT = 300  # characters of a text of a host that the terminal shows
_TRIES = 3  # wrong answers, as NumberOfPasswordPrompts of ssh
_ASKING = ("keyboard-interactive", "password")  # in ssh's order
_unanswered: set[str] = set()  # hosts that are not asked again, such as by each poll of `wait`


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


class _Interview:
    """Answers the questions of one host on the terminal."""

    def __init__(self, target: Target, phase: Phase) -> None:
        self._target = target
        self._phase = phase
        self._rounds = 0

    def answer(
        self, title: str, instructions: str, questions: Sequence[tuple[str, bool]]
    ) -> list[str]:
        """Return an answer for each question of the host: (text, whether to show the answer)."""
        self._rounds += 1
        if self._rounds > _MAX_ROUNDS:
            raise HostError(self._target.label, "it does not stop asking questions")
        texts = [self._harmless(text) for text in (title, instructions) if text.strip()]
        return [
            self.ask("\n".join([*texts, self._harmless(text) or "?"]), echo=echo)
            for text, echo in questions
        ]

    def ask(self, question: str, *, echo: bool) -> str:
        """Return the answer to one harmless question; the clock stops meanwhile."""
        lines = "\n".join(f"{self._target.label}: {line}" for line in question.splitlines())
        with self._phase.suspended():
            try:
                return terminal_prompt.ask(f"{lines} ", echo=echo)
            except terminal_prompt.DeclinedError as error:
                raise HostError(
                    self._target.label, f"its question has no answer: {error}"
                ) from error

    def _harmless(self, text: str) -> str:
        return sanitize(text.strip()[:_MAX_TEXT], lines=True)


def log_in(
    target: Target, transport: paramiko.Transport, bound: Callable[[], Phase], *, login_hint: str
) -> None:
    """Log in on a connection whose host key is trusted.

    Args:
        target: gives the user name and the keys to try.
        transport: the connection.
        bound: returns the time limit of one try.
        login_hint: the hint if the host has questions that nobody answers.

    Raises:
        HostError: the host accepts none of the keys and answers.
    """
    tried: list[str] = []
    problems: list[str] = []
    allowed = _try_keys(target, transport, bound, tried=tried, problems=problems)
    needs_more = bool(allowed)  # a key was accepted, or keys are not
    if allowed is None:
        allowed = _allowed(target, transport, bound)
    for method in _ASKING:
        # A password may be asked after a code, and a code after a password.
        while allowed and method in allowed and _may_ask(target):
            _unanswered.add(target.label)
            allowed = _ask(target, transport, bound, method=method)
            _unanswered.discard(target.label)
    if allowed == []:
        return
    hint = f"make `ssh {target.label}` work without a password"
    if any(method in (allowed or ()) for method in _ASKING):
        hint = login_hint
    if needs_more:
        raise HostError(
            target.label,
            f"it requires more than a key from {target.user}: {', '.join(allowed or ())}"[
                :_MAX_TEXT
            ],
            hint=hint,
        )
    what = f"there is no key to log in with as {target.user}"
    if tried:
        what = f"it accepts none of the keys of {target.user}: {', '.join(tried)}"
    raise HostError(target.label, "; ".join([what, *problems]), hint=hint)


def _try_keys(
    target: Target,
    transport: paramiko.Transport,
    bound: Callable[[], Phase],
    tried: list[str],
    problems: list[str],
) -> list[str] | None:
    """Try all keys.

    Returns:
        The methods that the host still requires, none if the login is complete; None if it accepts
        no key.
    """
    left: list[str] | None = None
    agent = _agent(target)
    try:
        for name, key in _keys(target, agent, problems=problems):
            try:
                with bound():
                    left = list(transport.auth_publickey(target.user, key))
            except paramiko.BadAuthenticationType as error:
                return list(error.allowed_types)
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
            if "publickey" not in left:  # otherwise the host requires a second key
                break
    finally:
        if agent is not None:
            agent.close()
    return left


def _allowed(
    target: Target, transport: paramiko.Transport, bound: Callable[[], Phase]
) -> list[str] | None:
    """Return the methods that a host offers; None if it does not say."""
    try:
        with bound():
            return list(transport.auth_none(target.user))
    except paramiko.BadAuthenticationType as error:
        return list(error.allowed_types)
    except (paramiko.SSHException, OSError, EOFError):
        return None


def _may_ask(target: Target) -> bool:
    return target.label not in _unanswered and terminal_prompt.available()


def _ask(
    target: Target, transport: paramiko.Transport, bound: Callable[[], Phase], method: str
) -> list[str]:
    """Log in with answers of the user; return the methods that the host still requires.

    Raises:
        HostError: the answers are wrong, or the user gives none.
    """
    for _ in range(_TRIES):
        try:
            with bound() as phase:
                interview = _Interview(target, phase)
                transport.auth_timeout = _MAX_ROUNDS * terminal_prompt.HUMAN_TIMEOUT
                if method == "password":
                    answer = interview.ask("password:", echo=False)
                    return list(transport.auth_password(target.user, answer, fallback=False))
                return list(transport.auth_interactive(target.user, interview.answer))
        except paramiko.BadAuthenticationType as error:
            return list(error.allowed_types)
        except paramiko.AuthenticationException as error:
            if not transport.is_active():
                raise HostError(
                    target.label, "it closed the connection during the login"
                ) from error
            continue
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise HostError(target.label, f"the login failed: {error}"[:_MAX_TEXT]) from error
    raise HostError(target.label, f"it accepts none of {_TRIES} answers of {target.user}")


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
