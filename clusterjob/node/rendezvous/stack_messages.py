"""The messages about the stacks and the progress of the workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from clusterjob.node.stacks.grouping import RankStack
from clusterjob.node.system.codec import Limit

_Number = Annotated[int, Limit((1 << 24) - 1)]


@dataclass(frozen=True)
class StackFound:
    """The stacks of one living rank: a part of the answer to `CollectStacks`."""

    restart: _Number
    stack: RankStack


@dataclass(frozen=True)
class StacksCollected:
    """The end of the answer to `CollectStacks`.

    Attributes:
        dumps: the dumps of torch's flight recorder, relative to the job directory.
    """

    restart: _Number
    dumps: Annotated[tuple[Annotated[str, Limit(300)], ...], Limit(1 << 12)] = ()


@dataclass(frozen=True)
class ProgressReported:
    """The answer to `ReportProgress`.

    Attributes:
        number: that of the question.
        quiet: seconds since the last output, or the last heartbeat, of a worker of the node.
        moved: whether a worker has moved since the last sample of its stacks.
        step: the step in the last heartbeat; -1 without one.
    """

    number: _Number
    quiet: float
    moved: bool
    step: Annotated[int, Limit(2**62, minimum=-1)] = -1


@dataclass(frozen=True)
class CollectStacks:
    """Send the stacks of all living ranks within `seconds`: one `StackFound` for each.

    `dumps`: seconds to wait for the dumps of torch's flight recorder.
    """

    restart: _Number
    seconds: float
    dumps: float = 0.0


@dataclass(frozen=True)
class ReportProgress:
    """Report the signs of life of the workers.

    Attributes:
        number: the number of the question.
        sample: whether to sample the workers' stacks too.
        first: whether that sample is the first one since the last output of the job.
    """

    number: _Number
    sample: bool
    first: bool
