"""The requests that a remote submitter sends to the host server.

Each request is one line of JSON; its field `size` is the number of bytes that follow. Bytes follow
`Put`, `Install` and `ReceiveFiles` only.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Annotated

from clusterjob.node.system.codec import Codec, Limit

_MAX_ITEMS = 1_000_000
_Text = Annotated[str, Limit(8 << 20)]
_Texts = Annotated[tuple[_Text, ...], Limit(_MAX_ITEMS)]
_Size = Annotated[int, Limit(2**63 - 1)]


@dataclass(frozen=True)
class JobRequest:
    """A request about one job."""

    job: _Text


@dataclass(frozen=True)
class NodeRequest(JobRequest):
    """A request about one node of a job."""

    node: int


@dataclass(frozen=True)
class WorkdirRequest(JobRequest):
    """A request about files below a job's working directory.

    Attributes:
        workdir: the directory: absolute, or relative to the job's directory.
    """

    workdir: _Text


# -- check a host --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """Check this host before anything is sent.

    Attributes:
        need: the bytes that will be written.
        torch: whether the job needs torch.
        own: whether the host server runs in the job's interpreter.
        gpus: whether to list the GPUs.
    """

    need: _Size
    torch: bool
    own: bool
    gpus: bool = False


@dataclass(frozen=True)
class Fit(JobRequest):
    """Check the interpreter that the job's script will find after its setup lines.

    Attributes:
        setup: shell lines.
        workdir: absolute, or relative to the job's directory.
        torch: whether the job needs torch.
    """

    python: _Text
    setup: _Texts
    workdir: _Text
    torch: bool


@dataclass(frozen=True)
class Facts:
    """Return facts about torch in the job's interpreter.

    Attributes:
        setup: shell lines.
        env: variables of the job.
        workdir: the directory in which the setup lines run.
    """

    python: _Text
    setup: _Texts
    env: dict[str, str]
    workdir: _Text


# -- send files ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Put(NodeRequest):
    """Create the job's directory with its files.

    Attributes:
        files: (name, mode, size) in the order of their bytes.
    """

    files: Annotated[tuple[tuple[_Text, int, _Size], ...], Limit(_MAX_ITEMS)]


@dataclass(frozen=True)
class Install(JobRequest):
    """Create the job's copy of the code; its list of files follows."""


@dataclass(frozen=True)
class FindStored:
    """Return whether the code store has a file with this digest and size."""

    digest: _Text
    length: _Size


@dataclass(frozen=True)
class ReceiveFiles:
    """Add files to the code store.

    Attributes:
        files: (digest, size) in the order of their bytes.
    """

    files: Annotated[tuple[tuple[_Text, _Size], ...], Limit(_MAX_ITEMS)]


# -- poll jobs -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PollNode(NodeRequest):
    """Return the state of a node and new data in its files.

    Attributes:
        logs: whether to send its logs.
        most: the bytes to send at once.
        sizes: the size of each growing file that the submitter has.
        stamps: the stamp (time, size and inode) of each replaced file that the submitter has.
    """

    logs: bool
    most: _Size
    sizes: dict[str, _Size]
    stamps: dict[str, str]


@dataclass(frozen=True)
class JobToPoll:
    """One job of `PollJobs`.

    Attributes:
        job: the name of its directory.
        logs: ``all``, ``none``, or ``last`` for the workers' stderr after the step has ended.
        sizes, stamps: the files that the submitter has, as in `PollNode`.
    """

    job: _Text
    logs: _Text
    sizes: dict[str, _Size]
    stamps: dict[str, str]


@dataclass(frozen=True)
class PollJobs:
    """Return new data in the directories of jobs, at most `most` bytes at once."""

    most: _Size
    jobs: Annotated[tuple[JobToPoll, ...], Limit(_MAX_ITEMS)]


# -- fetch results -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tree(WorkdirRequest):
    """List at most `most` files, directories and links at paths below the working directory."""

    paths: _Texts
    most: _Size


@dataclass(frozen=True)
class Digests(WorkdirRequest):
    """Return the digests of files below the working directory."""

    paths: _Texts


@dataclass(frozen=True)
class Get(WorkdirRequest):
    """Return parts of files below the working directory.

    Attributes:
        parts: (path, offset, length) of each.
    """

    parts: Annotated[tuple[tuple[_Text, _Size, _Size], ...], Limit(_MAX_ITEMS)]


# -- run scheduler commands ----------------------------------------------------------------------


@dataclass(frozen=True)
class RunCommand:
    """Start a command; return its output if it ends in time, else its number.

    Attributes:
        env: variables to add.
        job: the job in whose directory it runs; empty for none.
        wait: maximum seconds to wait for its end.
    """

    argv: _Texts
    env: dict[str, str]
    job: _Text
    wait: float


@dataclass(frozen=True)
class ReapCommand:
    """Return the output of a started command; wait at most `wait` seconds for its end."""

    number: int
    wait: float


@dataclass(frozen=True)
class DropCommand:
    """Kill a started command."""

    number: int


# -- run inside a job ----------------------------------------------------------------------------


@dataclass(frozen=True)
class EnterJob:
    """Become the program of `clusterjob.node.inside`: the session ends, its streams continue."""


@dataclass(frozen=True)
class ExecCommand:
    """Execute a scheduler command in place of the host server, on the streams of the session.

    Attributes:
        env: variables to add.
    """

    argv: _Texts
    env: dict[str, str]


# -- start and stop jobs -------------------------------------------------------------------------


@dataclass(frozen=True)
class Reserve(JobRequest):
    """Choose a node's GPUs.

    Attributes:
        gpus: their numbers, or ``auto`` for idle ones; empty for any.
        count: the number of GPUs; 0 for all idle ones.
    """

    gpus: _Text
    count: int


@dataclass(frozen=True)
class Start(NodeRequest):
    """Start a node's agent.

    Attributes:
        script: name of the file in the job's directory that starts it.
        env: variables to add.
    """

    script: _Text
    env: dict[str, str]


@dataclass(frozen=True)
class Up(NodeRequest):
    """Return whether a node's agent runs."""


@dataclass(frozen=True)
class Cancel(NodeRequest):
    """Stop a node's agent.

    Attributes:
        grace: the job's grace period in seconds.
        interrupt: whether to send SIGINT and return immediately.
        stacks: whether to save the stacks of the workers first.
    """

    grace: float
    interrupt: bool = False
    stacks: bool = False


@dataclass(frozen=True)
class RequestStop:
    """Write a stop request into each job's directory.

    Attributes:
        interrupt: whether the workers get SIGINT first.
        stacks: whether to save their stacks before.
    """

    jobs: _Texts
    interrupt: bool = False
    stacks: bool = False


@dataclass(frozen=True)
class Remove(JobRequest):
    """Delete the job's directory on this host."""


@dataclass(frozen=True)
class Clean:
    """Measure ended jobs, and the code that no other job uses.

    Attributes:
        jobs: the names of their directories.
        remove: whether to remove them too; a job whose agent runs is kept.
    """

    jobs: _Texts
    remove: bool


HostRequest: typing.TypeAlias = (
    Check | Fit | Facts
    | Put | Install | FindStored | ReceiveFiles
    | PollNode | PollJobs
    | Tree | Digests | Get
    | RunCommand | ReapCommand | DropCommand
    | EnterJob | ExecCommand
    | Reserve | Start | Up | Cancel | RequestStop | Remove | Clean
)  # fmt: skip
REQUESTS = Codec(*typing.get_args(HostRequest))
