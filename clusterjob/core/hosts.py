"""Parse host lists such as ``a,b[1-4],user@c:2222``, and host files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from clusterjob.errors import SpecError
from clusterjob.node.system.ranges import expand_numbers, split_hostlist

MOST = 4096  # maximum number of hosts in one list: a typo must not fill the memory
_HINT = "write hosts as a,b[1-4],user@c:2222"
_NAME = re.compile(r"[\w.-]+|[0-9A-Fa-f:.]+(%[\w.-]+)?")
# No shell metacharacter: ssh inserts the user (%r) into commands such as ProxyCommand.
_USER = re.compile(r"\w[\w.+%#=-]*(@\w[\w.-]*)?")

# Variables of an MPI task of Volcengine's MLP. Such a task runs the command only on worker 0. The
# file lists the other workers.
PLATFORM_FILE, PLATFORM_PORT = "MLP_MPI_HOSTFILE", "MLP_SSH_PORT"


@dataclass(frozen=True)
class Host:
    """One host of a job, as the user wrote it.

    Attributes:
        name: a name, an alias of the user's ssh configuration, or an address.
        user, port: None for the value in the ssh configuration.
        slots: number of workers from a host file; None if not given.
    """

    name: str
    user: str | None = None
    port: int | None = None
    slots: int | None = None

    def __str__(self) -> str:
        """Return the host as the user wrote it: ``user@c:2222``."""
        name = f"[{self.name}]" if ":" in self.name and self.port else self.name
        return f"{self.user}@" * bool(self.user) + name + f":{self.port}" * bool(self.port)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts of a list in the written order, including duplicates.

    Raises:
        SpecError: the list is invalid or empty.
    """
    found: list[Host] = []
    try:
        for word in (word for part in split_hostlist(text) for word in _expanded(part, text)):
            if len(found) == MOST:
                raise SpecError(f"{_short(text)} names more than {MOST} hosts")
            found.append(_host(word, text))
    except ValueError as error:
        raise SpecError(f"{_short(text)} is not a list of hosts: {error}", _HINT) from error
    if not found:
        raise SpecError(f"{_short(text)} names no host", _HINT)
    return tuple(found)


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Return the hosts of a host file.

    A line has a list of hosts and optionally ``slots=8``; ``#`` begins a comment.

    Raises:
        SpecError: the file cannot be read, a line is invalid, or the file has no host.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"the host file {path} cannot be read: "
            f"{getattr(error, 'strerror', None) or 'it is not UTF-8 text'}"
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
            f"the host file {path} names no host", "write one host per line, such as: gpu1 slots=8"
        )
    return tuple(found)


def named_hosts(text: str | None, file: str | None, directory: Path) -> tuple[Host, ...]:
    """Return the hosts of --hosts or of --hostfile; none if neither is given.

    Args:
        text: the value of --hosts.
        file: the value of --hostfile.
        directory: the base of a relative `file`.

    Raises:
        SpecError: both are given, or one of them is invalid.
    """
    if text is not None and file is not None:
        raise SpecError("--hosts and --hostfile are both given", "give only one of them")
    if text is not None:
        return parse_hosts(text)
    return read_hostfile(directory / file) if file is not None else ()


def of_platform(environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the hosts that MLP lists on worker 0 of an MPI task; empty in any other process.

    Raises:
        SpecError: the platform's file or port is invalid.
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
        match = re.fullmatch(r"(slots|max[_-]slots)=(\d{1,5})", word, re.ASCII)
        if match is None:
            raise SpecError(f"{_short(word)} is not valid here", "only slots=N may follow the host")
        if match[1] == "slots":
            slots = int(match[2])
            if slots < 1:
                raise SpecError(
                    "slots=0: must be at least 1", "remove the line to leave the host out"
                )
    return slots


def _expanded(part: str, text: str) -> Iterator[str]:
    """Expand the ranges of one part of a list, such as ``r[1-2]n[01-03]``.

    Brackets around an IPv6 address are not a range.
    """
    match = re.search(r"\[([^\[\]:]*)\]", part)
    if match is None:
        yield part
        return
    ranges = re.sub(r"\s*,\s*", ",", match[1].strip())
    for number in expand_numbers(ranges):
        yield from _expanded(part[: match.start()] + number + part[match.end() :], text)


# A user who writes host:8 probably means 8 workers: sshd uses no port up to 128 except 22.
_MAX_WORKERS = 128


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
        if port <= _MAX_WORKERS and port != 22:
            raise SpecError(
                f"{_short(word)} means port {port} of {name}, which is probably not sshd's port",
                f"for {port} workers: `{name} slots={port}` in a host file, or"
                f" --nproc-per-node {port}; for a port: ~/.ssh/config",
            )
    else:
        name = place
    # ssh would read a name that begins with a dash as an option.
    if (
        not _NAME.fullmatch(name)
        or name.startswith(("-", "."))
        or name.count(":") == 1  # an IPv6 address has at least two
        or (at and (not _USER.fullmatch(user) or user.startswith("-")))
    ):
        where = "" if word == text else f", in {_short(text)}"
        raise SpecError(f"{_short(word)} is not a valid host{where}", _HINT)
    return Host(name, user or None, port=port)


def _port(digits: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,5}", digits, re.ASCII) or not 0 < int(digits) < 65536:
        raise SpecError(f"{_short(digits)} is not a port, in {_short(text)}", _HINT)
    return int(digits)


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
