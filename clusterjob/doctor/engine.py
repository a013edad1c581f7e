"""Run doctor checks in order: findings, their states, and the dependencies between checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from clusterjob.errors import ClusterJobError, os_error_text

_SHOWN = 4  # maximum number of hosts to name; the other hosts are only counted


class CheckState(str, Enum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    UNKNOWN = "unknown"  # not checked, or only a running job can show the result

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Check:
    """One line of the output of `doctor`.

    Attributes:
        name: the checked part, in one or two words.
        state: the result.
        message: the finding, one line.
        hint: a command or a place that helps; empty if the state is OK.
    """

    name: str
    state: CheckState
    message: str
    hint: str = ""


@dataclass(frozen=True)
class CheckFinding:
    """The finding of one check function; see `Check` for the fields."""

    state: CheckState
    message: str
    hint: str = ""


def ok(message: str) -> CheckFinding:
    """Return a finding with the state OK."""
    return CheckFinding(CheckState.OK, message)


def warning(message: str, hint: str) -> CheckFinding:
    """Return a warning: jobs run, but with a disadvantage."""
    return CheckFinding(CheckState.WARNING, message, hint=hint)


def failed(message: str, hint: str) -> CheckFinding:
    """Return a failure: jobs cannot run."""
    return CheckFinding(CheckState.FAILED, message, hint=hint)


def unknown(message: str, hint: str = "") -> CheckFinding:
    """Return a finding with the state UNKNOWN."""
    return CheckFinding(CheckState.UNKNOWN, message, hint=hint)


@dataclass(frozen=True)
class CheckStep:
    """One check function, with its name and the earlier checks that it needs.

    Attributes:
        name: the check's name.
        find: runs the check and returns its findings; a `ClusterJobError` or an OSError counts as
            a failure with the error's message.
        needs: names of earlier checks that must succeed before this one runs.
        hint: the hint for an error without a hint of its own.
    """

    name: str
    find: Callable[[], Iterable[CheckFinding]]
    needs: tuple[str, ...] = ()
    hint: str = ""


def run_checks(steps: Iterable[CheckStep]) -> Iterator[Check]:
    """Run the checks in order and yield each result as soon as it is known.

    A check that needs a failed check is not run; its state is UNKNOWN.
    """
    missed: set[str] = set()
    for step in steps:
        absent = next((name for name in step.needs if name in missed), None)
        for found in _findings(step, absent):
            if absent or found.state is CheckState.FAILED:
                missed.add(step.name)
            yield Check(step.name, found.state, message=one_line(found.message), hint=found.hint)


def _findings(step: CheckStep, absent: str | None) -> Iterator[CheckFinding]:
    """Run one check and yield its findings; an error becomes a finding.

    Args:
        step: the check.
        absent: name of an earlier check that it needs and that failed; None if all succeeded.
    """
    try:
        if absent:
            yield unknown(f"not checked: it needs {absent!r}")
        else:
            yield from step.find()
    except ClusterJobError as error:
        yield failed(error.message, error.hint or step.hint)
    except OSError as error:
        yield failed(os_error_text(error), step.hint)


def one_line(text: str) -> str:
    """Join the lines of a text with semicolons."""
    return "; ".join(line.strip() for line in text.splitlines() if line.strip()).replace(
        ":; ", ": "
    )


def of_hosts(found: Mapping[str, CheckFinding], total: int | None = None) -> Iterator[CheckFinding]:
    """Yield the findings of hosts; one finding names all hosts whose findings are equal.

    Args:
        found: the finding of each host, by host name.
        total: number of hosts; by default the number of findings.
    """
    together: dict[CheckFinding, list[str]] = {}
    for host, finding in found.items():
        together.setdefault(finding, []).append(host)
    for finding, hosts in together.items():
        if len(hosts) == (total or len(found)) > 1 and finding.state is CheckState.OK:
            yield replace(finding, message=f"{finding.message}, on all {len(hosts)} hosts")
        else:
            yield replace(finding, message=f"{listed(hosts)}: {finding.message}")


def listed(hosts: Iterable[str]) -> str:
    """Return host names as text: the first names, and the number of the other hosts."""
    names = list(hosts)
    more = len(names) - _SHOWN
    return ", ".join(names) if more <= 1 else f"{', '.join(names[:_SHOWN])} and {more} more"
