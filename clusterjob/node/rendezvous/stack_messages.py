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
