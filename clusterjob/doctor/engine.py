"""Checks of a cluster before there is a job: what was found, how it is judged, and which check
needs which other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from clusterjob.errors import ClusterJobError

_SHOWN = 4  # hosts that are named before the rest is counted


class CheckState(str, Enum):
    """What came of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    UNKNOWN = "unknown"  # it could not be looked at, or only a job can tell

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Check:
    """One line of an examination.

    Attributes:
        name: what was looked at, one word or two.
        state: what came of it.
        words: what was found, one line.
        hint: what can be done about it; empty where it is ok.
    """

    name: str
    state: CheckState
    words: str
    hint: str = ""


@dataclass(frozen=True)
class Finding:
    """What one look has found; see `Check`."""

    state: CheckState
    words: str
    hint: str = ""


def ok(words: str) -> Finding:
    """Return that all is well."""
    return Finding(CheckState.OK, words)


def warning(words: str, hint: str) -> Finding:
    """Return that jobs run, and that something is not as it should be."""
    return Finding(CheckState.WARNING, words, hint=hint)


def failed(words: str, hint: str) -> Finding:
    """Return that jobs cannot run so."""
    return Finding(CheckState.FAILED, words, hint=hint)


def unknown(words: str, hint: str = "") -> Finding:
    """Return that it cannot be told."""
    return Finding(CheckState.UNKNOWN, words, hint=hint)


@dataclass(frozen=True)
class Look:
    """One look at a cluster.

    Attributes:
        name: the check's name.
        find: looks and returns what it found; a `ClusterJobError`, or an OSError, is a failure in
            the error's words.
        needs: names of looks before it, without whose success there is nothing to look at.
        hint: what can be done about a failure whose own words do not say.
    """

    name: str
    find: Callable[[], Iterable[Finding]]
    needs: tuple[str, ...] = ()
    hint: str = ""


def examine(looks: Iterable[Look]) -> Iterator[Check]:
    """Look, one after the other, and yield each check when it is done; what needs one that failed
    is not looked at, and says so.
    """
    missed: set[str] = set()
    for look in looks:
        absent = next((name for name in look.needs if name in missed), None)
        if absent is not None:
            missed.add(look.name)
            yield Check(look.name, CheckState.UNKNOWN, words=f"not checked: it needs {absent!r}")
            continue
        try:
            for found in look.find():
                if found.state is CheckState.FAILED:
                    missed.add(look.name)
                yield Check(look.name, found.state, words=one_line(found.words), hint=found.hint)
        except ClusterJobError as error:
            missed.add(look.name)
            yield Check(
                look.name,
                CheckState.FAILED,
                words=one_line(error.message),
                hint=error.hint or look.hint,
            )
        except OSError as error:
            missed.add(look.name)
            words = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
            yield Check(look.name, CheckState.FAILED, words=one_line(words), hint=look.hint)


def one_line(text: str) -> str:
    """Return a text on one line, as one that can be printed."""
    return "; ".join(line.strip() for line in text.splitlines() if line.strip()).replace(
        ":; ", ": "
    )


def of_hosts(found: Mapping[str, Finding], total: int | None = None) -> Iterator[Finding]:
    """Yield what was found on hosts: hosts of which the same is to be said in one line, with their
    names.

    Args:
        found: by the host's name.
        total: how many hosts there are; by default those that something was found on.
    """
    together: dict[Finding, list[str]] = {}
    for host, finding in found.items():
        together.setdefault(finding, []).append(host)
    for finding, hosts in together.items():
        if len(hosts) == (total or len(found)) > 1 and finding.state is CheckState.OK:
            yield replace(finding, words=f"{finding.words}, on all {len(hosts)} hosts")
        else:
            yield replace(finding, words=f"{listed(hosts)}: {finding.words}")


def listed(hosts: Iterable[str]) -> str:
    """Return names as text: some of them, and how many more there are."""
    names = list(hosts)
    more = len(names) - _SHOWN
    return ", ".join(names) if more <= 1 else f"{', '.join(names[:_SHOWN])} and {more} more"
