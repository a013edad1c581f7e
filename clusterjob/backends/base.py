"""Where jobs can run. A backend is looked up by name and imported when it is needed.

A package of yours becomes one by an entry point in the group ``clusterjob.backends`` that names a
class with these methods.
"""

from __future__ import annotations

import functools
import importlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast, overload, runtime_checkable

from clusterjob.errors import UnknownCluster

if TYPE_CHECKING:
    from clusterjob.core.plans import Plan
    from clusterjob.core.records import Handle, Record
    from clusterjob.core.spec import JobSpec
    from clusterjob.doctor.engine import Check
    from clusterjob.node.verdict import JobState, Verdict
    from clusterjob.remote.fetch import Fetched

ENTRY_POINTS = "clusterjob.backends"

_BUILTIN: Mapping[str, str] = {
    "local": "clusterjob.backends.local.backend:LocalBackend",
    "slurm": "clusterjob.backends.slurm.backend:SlurmBackend",
    "ssh": "clusterjob.backends.ssh.backend:SshBackend",
    "mlp": "clusterjob.backends.mlp.backend:MlpBackend",
}


@dataclass(frozen=True)
class Status:
    """How a job stands.

    Attributes:
        state: where it stands.
        reason: one line, such as what it waits for; empty if there is nothing to say.
        verdict: how it ended, once it has.
        started_at: when its workers first started, RFC 3339, UTC; None before.
        restarts: how often they were started again.
        handle: where the job turned out to be, if its record did not say.
        provisional: whether the verdict is a guess, as hosts that know the end were not reached.
    """

    state: JobState
    reason: str = ""
    verdict: Verdict | None = None
    started_at: str | None = None
    restarts: int = 0
    handle: Handle | None = None
    provisional: bool = False


@dataclass(frozen=True)
class FetchLimits:
    """How much one host may send when results are fetched.

    Attributes:
        files: files, directories and links at the paths that are asked for.
        size: bytes of the files that have to be brought.
    """

    files: int = 100_000
    size: int = 50 << 30


FETCH_LIMITS = FetchLimits()


class Backend(Protocol):
    """What every backend can do."""

    def plan(self, spec: JobSpec) -> Plan:
        """Return what submitting the job would do. Runs no command and contacts nothing."""

    def submit(self, plan: Plan) -> Handle:
        """Start what was planned, whose files are in place; the job ends with this process until
        `detach`.

        Raises:
            SubmitError: it cannot be started; nothing of it is left running.
        """

    def detach(self, handle: Handle) -> None:
        """Let the job live on without this process."""

    def status(self, records: Sequence[Record]) -> dict[str, Status]:
        """Return how jobs stand, by job id: one question to the cluster for all of them."""

    def collect(self, record: Record) -> None:
        """Have the logs in `record.job_dir` as far as they are written by now; where the job writes
        there itself, do nothing.
        """

    def cancel(self, records: Sequence[Record]) -> None:
        """Stop jobs and return once they are being stopped; a job that has ended stays as it is."""


@runtime_checkable
class Fetcher(Protocol):
    """What a backend can do whose jobs work on disks that are not this machine's."""

    def fetch(
        self,
        record: Record,
        paths: Sequence[str],
        target: Path,
        nodes: Sequence[int] | None,
        may_replace: Callable[[list[str]], bool],
        limits: FetchLimits,
    ) -> list[Fetched]:
        """Bring results from the job's hosts; see `clusterjob.core.jobs.fetch`."""


@runtime_checkable
class Examiner(Protocol):
    """What a backend can do that knows how to look at its cluster before there is a job."""

    def examine(self, spec: JobSpec) -> Iterator[Check]:
        """Yield what is found of the cluster's fitness for such a job, each check as it is done;
        starts no job, changes nothing.

        Raises:
            UsageError: the job makes no sense on this cluster.
        """


@runtime_checkable
class Interrupter(Protocol):
    """What a backend can do whose agents hear of Ctrl-C: interrupt workers (SIGINT) before it
    cancels.
    """

    def interrupt(self, record: Record) -> bool:
        """Have the workers interrupted, and stopped after the job's grace; returns at once.

        False where the job can only be cancelled: no agent runs workers of it yet.
        """


@runtime_checkable
class Foreground(Protocol):
    """What a backend can do whose jobs run beside the caller: give rank 0 its stdin, a terminal
    included.

    Attributes:
        stdin: the descriptor that becomes rank 0's stdin in jobs that are submitted from now on;
            None for an empty one.
    """

    stdin: int | None

    def interrupt_prompt(self, record: Record) -> bool:
        """Interrupt the worker that waits for input from this process's terminal; return whether
        there is one.
        """


class _Names(Sequence[str]):
    """All backends' names, ours first. Those of other packages are looked up only when ours do not
    answer the question.

    Reading the metadata of every installed package takes a tenth of a second in a large
    environment.
    """

    @functools.cached_property
    def _all(self) -> list[str]:
        from importlib.metadata import entry_points

        return [
            *_BUILTIN,
            *sorted(
                point.name
                for point in entry_points(group=ENTRY_POINTS)
                if point.name not in _BUILTIN
            ),
        ]

    def __contains__(self, name: object) -> bool:
        return name in _BUILTIN or name in self._all

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        return next(iter(_BUILTIN)) if index == 0 else self._all[index]

    def __len__(self) -> int:
        return len(self._all)


def names() -> Sequence[str]:
    """Return the names of all backends, ours first."""
    return _Names()


def preferred() -> str:
    """Return the backend where nobody names a cluster: Slurm where this machine can submit to one,
    else this machine itself.
    """
    if shutil.which("sbatch") is not None:
        from clusterjob.backends.slurm.client import Client

        if Client.is_here():
            return "slurm"
    return "local"


def load(name: str) -> Backend:
    """Return a backend.

    Raises:
        UnknownCluster: there is none of this name.
    """
    if name in _BUILTIN:
        module, _, attribute = _BUILTIN[name].partition(":")
        return cast(Backend, getattr(importlib.import_module(module), attribute)())
    from importlib.metadata import entry_points

    for point in entry_points(group=ENTRY_POINTS, name=name):
        return cast(Backend, point.load()())
    raise UnknownCluster(f"there is no backend {name!r}")
