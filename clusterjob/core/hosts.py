"""Hosts as people write them: ``a,b[1-4],user@c:2222``, and host files in the formats that they
have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from clusterjob.errors import SpecError

# Hosts that one list may name: a typing error such as n[1-99999999] is not to fill the memory.
MOST = 4096
_HINT = "write hosts as a,b[1-4],user@c:2222"
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_NAME = re.compile(r"[\w.-]+|[0-9A-Fa-f:.]+(%[\w.-]+)?")
# No character that a shell reads: a ProxyCommand or a `Match exec` of the ssh configuration may
# hold %r.
_USER = re.compile(r"\w[\w.+%#=-]*(@\w[\w.-]*)?")

# Volcengine's MLP: on a task of the MPI kind only worker 0 runs the command, and finds the others
# here.
PLATFORM_FILE, PLATFORM_PORT = "MLP_MPI_HOSTFILE", "MLP_SSH_PORT"


@dataclass(frozen=True)
class Host:
    """One host of a job, as it was written.

    Attributes:
        name: a name, an alias of the user's ssh configuration, or an address.
        user, port: None for what the ssh configuration says.
        slots: workers on it, where a host file says; None where it does not.
    """

    name: str
    user: str | None = None
    port: int | None = None
    slots: int | None = None

    def __str__(self) -> str:
        """Return it as it was written: ``user@c:2222``."""
        name = f"[{self.name}]" if ":" in self.name and self.port else self.name
        return f"{self.user}@" * bool(self.user) + name + f":{self.port}" * bool(self.port)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts of a list, in the order in which they are written; one that is written twice
    is there twice.

    Raises:
        SpecError: it is no such list, or it is empty.
    """
    found: list[Host] = []
    for part in _split(text):
        for word in _expanded(part, text):
            if len(found) == MOST:
                raise SpecError(f"{_short(text)} names more than {MOST} hosts")
            found.append(_host(word, text))
    if not found:
        raise SpecError(f"{_short(text)} names no host", _HINT)
    return tuple(found)


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Return the hosts of a file: a line is a list of hosts, then ``slots=8`` if it says so; ``#``
    begins a comment.

    Raises:
        SpecError: it cannot be read, a line makes no sense, or there is no host in it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"the host file {path} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}"
        ) from error
    found: list[Host] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].replace('"', "").replace("'", "").split()
        if not words:
            continue
        try:
            slots = _slots(words[1:])
            found += [replace(host, slots=slots) for host in parse_hosts(words[0])]
        except SpecError as error:
            raise SpecError(f"{path}, line {number}: {error.message}", error.hint) from error
    if not found:
        raise SpecError(
            f"the host file {path} names no host", "write one host a line, such as: gpu1 slots=8"
        )
    return tuple(found)


def named_hosts(text: str | None, file: str | None, directory: Path) -> tuple[Host, ...]:
    """Return the hosts of --hosts or of --hostfile; none where neither is given.

    Args:
        text: the value of --hosts.
        file: the value of --hostfile.
        directory: where a relative path of a host file begins.

    Raises:
        SpecError: both are given, or one of them makes no sense.
    """
    if text is not None and file is not None:
        raise SpecError("there are both --hosts and --hostfile", "one of them names the hosts")
    if text is not None:
        return parse_hosts(text)
    return read_hostfile(directory / file) if file is not None else ()


def of_platform(environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the hosts that a platform names to the one worker that runs the command of a task of
    the MPI kind; else none.

    Raises:
        SpecError: the platform's file or port makes no sense.
    """
    file = environ.get(PLATFORM_FILE, "").strip(" \"'")
    if not file:
        return ()
    port_text = environ.get(PLATFORM_PORT, "").strip(" \"'")
    port = _port(port_text, f"{PLATFORM_PORT}={port_text}") if port_text else None
    return tuple(replace(host, port=host.port or port) for host in read_hostfile(Path(file)))


def _slots(words: list[str]) -> int | None:
    slots = None
    for word in words:
        key, equals, value = word.partition("=")
        if (
            key not in ("slots", "max_slots", "max-slots")
            or not equals
            or not re.fullmatch(r"\d{1,5}", value, re.ASCII)
        ):
            raise SpecError(
                f"{_short(word)} means nothing here", "after the host only slots=N can stand"
            )
        if key == "slots":
            slots = int(value)
            if slots < 1:
                raise SpecError("slots=0 leaves no worker on the host", "take the line out")
    return slots


def _split(text: str) -> Iterator[str]:
    """Yield what commas and blanks divide, outside of brackets."""
    part, depth = "", 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if not 0 <= depth <= 1:
            raise SpecError(f"brackets within brackets, or none to close, in {_short(text)}", _HINT)
        if depth == 0 and (character == "," or character.isspace()):
            if part:
                yield part
            part = ""
        else:
            part += character
    if depth:
        raise SpecError(f"a bracket is not closed in {_short(text)}", _HINT)
    if part:
        yield part


def _expanded(part: str, text: str) -> Iterator[str]:
    """Yield the words that a part with ranges stands for: ``r[1-2]n[01-03]``; brackets around an
    IPv6 address are none.
    """
    match = re.search(r"\[([^\[\]:]*)\]", part)
    if match is None:
        yield part
        return
    head, tail = part[: match.start()], part[match.end() :]
    for piece in match[1].split(","):
        numbers = _RANGE.fullmatch(piece.strip())
        if numbers is None:
            raise SpecError(f"{_short(piece)} is no number and no range, in {_short(text)}", _HINT)
        first, last = int(numbers[1]), int(numbers[2] or numbers[1])
        if last < first or last - first >= MOST:
            raise SpecError(
                f"the range {piece} runs backwards or names more than {MOST} hosts", _HINT
            )
        for number in range(first, last + 1):
            yield from _expanded(f"{head}{number:0{len(numbers[1])}d}{tail}", text)


_MOST_WORKERS = (
    128  # no sshd listens at so small a port, but at 22; a number of workers is as small
)


def _host(word: str, text: str) -> Host:
    user, at, place = word.removeprefix("ssh://").rpartition("@")
    port: int | None = None
    bracketed = re.fullmatch(r"\[([^\]]+)\](?::(.+))?", place)
    if bracketed:
        name = bracketed[1]
        port = _port(bracketed[2], text) if bracketed[2] else None
    elif place.count(":") == 1:
        name, _, port_text = place.partition(":")
        port = _port(port_text, text)
        if port <= _MOST_WORKERS and port != 22:
            raise SpecError(
                f"{_short(word)} means port {port} of {name}, where hardly an sshd listens",
                f"{port} workers on it: `{name} slots={port}` in a host file, or --nproc-per-node {port}; a port: in ~/.ssh/config",
            )
    else:
        name = place
    # A name that begins with a dash would be an option to ssh.
    if (
        not _NAME.fullmatch(name)
        or name.startswith(("-", "."))
        or (at and (not _USER.fullmatch(user) or user.startswith("-")))
    ):
        raise SpecError(
            f"{_short(word)} cannot be a host, in {_short(text)}"
            if word != text
            else f"{_short(word)} cannot be a host",
            _HINT,
        )
    return Host(name, user or None, port=port)


def _port(digits: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,5}", digits, re.ASCII) or not 0 < int(digits) < 65536:
        raise SpecError(f"{_short(digits)} is no port, in {_short(text)}", _HINT)
    return int(digits)


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
