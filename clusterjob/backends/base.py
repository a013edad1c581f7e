"""The contract of a backend, and the registry that finds and imports a backend by its name.

Another package adds a backend by an entry point in the group ``clusterjob.backends``. The entry
point names a class with the methods of `Backend`.
"""

from __future__ import annotations

import functools
import pkgutil
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Protocol,
    cast,
    overload,
    runtime_checkable,
)

from clusterjob.errors import UnknownCluster
from clusterjob.node.system.codec import Limit

if TYPE_CHECKING:
    from clusterjob.core.capabilities import Capability
    from clusterjob.core.plans import Plan
    from clusterjob.core.proposals import Proposal
    from clusterjob.core.records import Handle, Record
    from clusterjob.core.spec import JobSpec
    from clusterjob.doctor.engine import Check
    from clusterjob.node.verdict import JobState, Verdict
    from clusterjob.remote.fetch import Fetched

ENTRY_POINTS = "clusterjob.backends"
_Rank = Annotated[int, Limit(1 << 24)]

_BUILTIN: Mapping[str, str] = {
    "local": "clusterjob.backends.local.backend:LocalBackend",
    "slurm": "clusterjob.backends.slurm.backend:SlurmBackend",
    "ssh": "clusterjob.backends.ssh.backend:SshBackend",
    "mlp": "clusterjob.backends.mlp.backend:MlpBackend",
}

# Backends that are preferred to `local`: the command that must exist here, and the function that
# must then return True.
_PREFERRED: Mapping[str, tuple[str, str]] = {
    "slurm": ("sbatch", "clusterjob.backends.slurm.client:is_here"),
}


class JobPhase(str, Enum):
    """A phase of a job whose agents have started."""

    SETUP = "setup"  # node 0's script prepares the Python environment
    NODES = "nodes"  # the agents join; the counts are nodes
    IMPORT = "import"  # the nodes, or the ranks, import torch
    START = "start"  # the ranks start, or run and have joined no process group
    RANKS = "ranks"  # the ranks join the process group
    RUNNING = "running"  # all ranks have formed the process group
    STOP = "stop"  # the workers are being stopped

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class JobProgress:
    """How far a job is that has not ended.

    Attributes:
        phase: its phase.
        done, total: the nodes or ranks that have done it, and all; 0 if they are unknown.
        detail: one line, such as why the workers are stopped, or how many nodes are left of an
            elastic job; empty without one.
        seconds: how long it has lasted, measured with one clock; None if it is unknown.
    """

    phase: JobPhase
    done: int = 0
    total: int = 0
    detail: str = ""
    seconds: float | None = None


@dataclass(frozen=True)
class Straggler:
    """One straggler; the details of an event `events.STRAGGLING`.

    Attributes:
        rank, node_rank, host: the rank.
        waited_s: seconds for which the others wait for it in each step.
        step_s: the length of a step in seconds.
    """

    rank: _Rank
    node_rank: _Rank
    host: Annotated[str, Limit(200, cuts=True)]
    waited_s: float
    step_s: float

    def to_json(self) -> dict[str, Any]:
        """Return the straggler for a user's program."""
        return {
            "rank": self.rank,
            "node": self.node_rank,
            "host": self.host,
            "waited_s": round(self.waited_s, 4),
            "step_s": round(self.step_s, 4),
            "share": round(self.waited_s / self.step_s, 3),
        }


@dataclass(frozen=True)
class Status:
    """The status of a job.

    Attributes:
        state: the job's state.
        reason: one line, such as why the job is pending; empty if there is no reason.
        verdict: the verdict, once the job has ended.
        started_at: when its workers first started, RFC 3339, UTC; None before.
        restarts: number of restarts of the workers.
        handle: the handle of the job, if its record has no handle and the backend found one.
        provisional: whether the verdict is a guess because the hosts that have the real verdict
            are unreachable.
        elapsed: seconds for which the workers of a running job have run, measured with one clock;
            None if it is unknown.
        progress: its phase; None if no agent has started, or if the backend does not know it.
        restart_reason: why the workers were started again the last time; empty if unknown.
        stragglers: the ranks that the others wait for in collectives.
        hosts: the scheduler's list of the job's nodes while it runs; empty if it has none.
    """

    state: JobState
    reason: str = ""
    verdict: Verdict | None = None
    started_at: str | None = None
    restarts: int = 0
    handle: Handle | None = None
    provisional: bool = False
    elapsed: float | None = None
    progress: JobProgress | None = None
    restart_reason: str = ""
    stragglers: tuple[Straggler, ...] = ()
    hosts: str = ""


@dataclass(frozen=True)
class FetchLimits:
    """Limits for the results that one host may send.

    Attributes:
        files: number of files, directories and links at the requested paths.
        size: total bytes of the files to transfer.
    """

    files: int = 100_000
    size: int = 50 << 30


FETCH_LIMITS = FetchLimits()


@dataclass(frozen=True)
class Leftover:
    """The files of an ended job outside of its directory on this machine.

    Attributes:
        size: their bytes.
        kept: why the job must not be removed, such as an unreachable host; empty if it can be.
    """

    size: int = 0
    kept: str = ""


class Backend(Protocol):
    """The methods that every backend has.

    Attributes:
        capabilities: the features that it supports; `clusterjob.core.capabilities` refuses a job
            that uses another feature.
        hints: its own advice for a missing feature, instead of the general hint.
    """

    capabilities: ClassVar[Collection[Capability]]
    hints: ClassVar[Mapping[Capability, str]]

    def plan(self, spec: JobSpec) -> Plan:
        """Return the plan of a job; run no command and contact no host."""

    def submit(self, plan: Plan) -> Handle:
        """Start a planned job whose files are already written.

        Until `detach`, the job ends when this process ends.

        Raises:
            SubmitError: the job cannot be started; no part of it is left running.
        """

    def detach(self, handle: Handle) -> None:
        """Let the job continue after this process ends."""

    def status(self, records: Sequence[Record]) -> dict[str, Status]:
        """Return the status of jobs by job id, with one request to the cluster for all jobs."""

    def collect(self, record: Record) -> None:
        """Update the logs in `record.job_dir`.

        Does nothing if the job itself writes its logs into this directory.
        """

    def cancel(self, records: Sequence[Record]) -> None:
        """Start to cancel jobs and return; a job that has ended is not changed."""

    def close(self) -> None:
        """Close connections and other resources; the backend is not used afterwards."""


@runtime_checkable
class Fetcher(Protocol):
    """A backend whose jobs write results to disks of other machines."""

    def fetch(
        self,
        record: Record,
        paths: Sequence[str],
        target: Path,
        nodes: Sequence[int] | None,
        may_replace: Callable[[list[str]], bool],
        limits: FetchLimits,
    ) -> list[Fetched]:
        """Fetch results from the job's hosts; see `clusterjob.core.jobs.fetch`."""


@runtime_checkable
class OutcomeReader(Protocol):
    """A backend whose jobs write the results of functions to disks of other machines."""

    def outcomes(
        self, record: Record, names: Mapping[int, Collection[str]], most: int
    ) -> dict[str, bytes] | None:
        """Return result files of a function's job; None if the job writes them on this machine.

        Args:
            record: the job.
            names: the names of the files in the folder `call` of the job, by node.
            most: maximum bytes that one host may send.

        Raises:
            ClusterJobError: a host cannot be reached, or sends too much.
        """


@runtime_checkable
class Executor(Protocol):
    """A backend that can start a program beside the workers of a running job."""

    def command(
        self, record: Record, node: int, request: Mapping[str, Any], *, terminal: bool
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command line and the environment of a program beside the node's workers.

        It uses the stdin, stdout and stderr with which it is started here.

        Args:
            record: the job.
            node: the node.
            request: what the program does; see `clusterjob.node.inside.main`.
            terminal: whether these streams are a terminal, which the program gets.

        Raises:
            ClusterJobError: the node cannot be reached, or the scheduler does not know the job.
        """

    def tunnel(self, record: Record, node: int, port: int) -> list[str]:
        """Return the command line that carries one connection to a port of a node on its streams.

        Empty if there is none: a relay beside the workers carries connections.

        Raises:
            ClusterJobError: the node cannot be reached.
        """


@runtime_checkable
class Checker(Protocol):
    """A backend with doctor checks of its cluster."""

    def doctor_checks(self, spec: JobSpec) -> Iterator[Check]:
        """Check whether the cluster can run a job, and yield each check when it is done.

        It does not start a job and makes no changes.

        Raises:
            UsageError: the job is invalid on this cluster.
        """


@runtime_checkable
class Cleaner(Protocol):
    """A backend whose ended jobs have files on other machines, or may run again."""

    def clean(self, records: Sequence[Record], *, remove: bool) -> tuple[dict[str, Leftover], int]:
        """Check whether ended jobs can be removed, and measure their files on other machines.

        Args:
            records: the jobs; an array is one record.
            remove: whether to remove these files, unless the job must be kept.

        Returns:
            The files of each job by its id, and the bytes of shared files that no other job uses.
        """


@runtime_checkable
class Proposer(Protocol):
    """A backend that proposes profiles for this machine to `clusterjob init`."""

    def propose(self) -> Iterable[Proposal]:
        """Return profiles; look at this machine only, and contact no host except Slurm's own."""


@runtime_checkable
class Interrupter(Protocol):
    """A backend that can interrupt the workers (SIGINT) on Ctrl-C before it cancels the job."""

    def interrupt(self, record: Record) -> bool:
        """Request an interrupt of the workers, and a stop after the job's grace; return at once.

        Returns False if no agent runs the job's workers yet, so that it can only be cancelled.
        """


@runtime_checkable
class Foreground(Protocol):
    """A backend whose jobs run on this machine, so that rank 0 can read the caller's stdin.

    Attributes:
        stdin: the descriptor that becomes rank 0's stdin in later jobs; it may be a terminal. None
            gives rank 0 an empty stdin.
    """

    stdin: int | None


class _Names(Sequence[str]):
    """The names of all backends, the built-in backends first.

    Entry points are read only if the built-in names are not enough. Reading the metadata of every
    installed package takes 0.1 s in a large environment.
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
    """Return the names of all backends, the built-in backends first."""
    return _Names()


def preferred() -> str:
    """Return the default backend: the first preferred backend that works here, else `local`."""
    for name, (command, is_here) in _PREFERRED.items():
        if shutil.which(command) is not None and pkgutil.resolve_name(is_here)():
            return name
    return "local"


_loaded: dict[str, Backend] = {}


def instance(name: str) -> Backend:
    """Return the process's one instance of a backend, which may hold connections and lifelines."""
    if name not in _loaded:
        _loaded[name] = load(name)
    return _loaded[name]


def load(name: str) -> Backend:
    """Import a backend and return a new instance of it.

    Raises:
        UnknownCluster: there is no backend of this name.
    """
    if name in _BUILTIN:
        return cast(Backend, pkgutil.resolve_name(_BUILTIN[name])())
    from importlib.metadata import entry_points

    for point in entry_points(group=ENTRY_POINTS, name=name):
        return cast(Backend, point.load()())
    raise UnknownCluster(f"there is no backend {name!r}")
