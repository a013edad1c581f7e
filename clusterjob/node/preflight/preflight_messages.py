"""The messages of the preflight: coordinator, agent and measuring process.

An agent passes `MeasureHost`, `MeasureGroup` and their answers on. No message names a node: an
agent can only report about its own.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Annotated

from clusterjob.node.system.codec import Codec, Limit

_Number = Annotated[int, Limit((1 << 31) - 1)]
_Name = Annotated[str, Limit(300)]

# -- from the coordinator ------------------------------------------------------------------------


@dataclass(frozen=True)
class BeginPreflight:
    """Start the measuring process, which answers `MeasuringStarted`.

    Attributes:
        seconds: seconds after which the process ends by itself.
        address, port: the store of the groups.
    """

    seconds: float
    address: _Name
    port: Annotated[int, Limit((1 << 16) - 1)]


@dataclass(frozen=True)
class BeginPreflightWithStore(BeginPreflight):
    """`BeginPreflight` for the coordinator's own agent; it has the socket of the store."""

    store: socket.socket


@dataclass(frozen=True)
class MeasureHost:
    """Measure the node alone, then answer `Measured`.

    Attributes:
        number: the number of the question.
        probe: a value of `clusterjob.node.preflight.measures.Probe`.
        seconds: how long one measure lasts, about.
    """

    number: _Number
    probe: _Name
    seconds: float


@dataclass(frozen=True)
class MeasureGroup:
    """Measure an all-reduce together with other nodes, then answer `Measured`.

    Attributes:
        number: the number of the question, the same on all nodes of the group.
        rank, size: the rank of this node in the group, and the number of nodes.
        backend: ``gloo`` or ``nccl``.
        seconds: how long the measure lasts, about.
    """

    number: _Number
    rank: Annotated[int, Limit((1 << 16) - 1)]
    size: Annotated[int, Limit(1 << 16, minimum=2)]
    backend: Annotated[str, Limit(8)]
    seconds: float


@dataclass(frozen=True)
class ReadClock:
    """Answer `ClockRead` at once."""

    number: _Number


@dataclass(frozen=True)
class EndPreflight:
    """End the measuring process."""


# -- from an agent -------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuringStarted:
    """The measuring process is ready.

    Attributes:
        machine: the boot id: nodes with the same one share a machine and are measured in turn.
        gpus: the number of its GPUs.
        backends: the backends of torch.distributed that it has.
        versions: the name and the version of each part that should be equal on all nodes.
    """

    machine: _Name
    gpus: Annotated[int, Limit(64)]
    backends: Annotated[tuple[Annotated[str, Limit(8)], ...], Limit(4)]
    versions: Annotated[tuple[tuple[_Name, _Name], ...], Limit(8)]


@dataclass(frozen=True)
class Measured:
    """The answer to `MeasureHost` and `MeasureGroup`.

    Attributes:
        values: the measured values, in the units and the order of the probe's measures; several
            times for several GPUs. Empty after an error.
        error: why there are no values, one line.
    """

    number: _Number
    values: Annotated[tuple[float, ...], Limit(128)]
    error: _Name = ""


@dataclass(frozen=True)
class ClockRead:
    """The node's clock, in microseconds since the epoch."""

    number: _Number
    microseconds: Annotated[int, Limit(2**62)]


@dataclass(frozen=True)
class MeasuringEnded:
    """The measuring process cannot be started or has ended; `why` is the reason."""

    why: _Name


# Between an agent and the measuring process: one message per packet of a socket pair.
TO_PROCESS = Codec(BeginPreflight, MeasureHost, MeasureGroup)
FROM_PROCESS = Codec(MeasuringStarted, Measured)
