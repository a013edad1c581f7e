"""The samples of a node's metrics as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class WorkerSample:
    """What one worker, with the processes below it, used since the last sample.

    Attributes:
        cpu: percent of one core.
        rss: resident memory, bytes.
        pss: proportional share of the memory, bytes; None if it was not read this time.
        read, written: bytes per second from and to disks.
        threads: number of threads.
        step: the mean length of its last steps, milliseconds; None if it is unknown.
        waited: its mean wait in collectives in a step, milliseconds.
    """

    cpu: float
    rss: int
    pss: int | None
    read: float
    written: float
    threads: int
    step: float | None = None
    waited: float | None = None

    @property
    def waits(self) -> float | None:
        """The percent of its steps for which it waits in collectives; None if it is unknown."""
        return waiting_percent(self.step, self.waited)


def waiting_percent(step: float | None, waited: float | None) -> float | None:
    """Return the percent of a step of this length that a wait takes; None if it is unknown."""
    return None if not step or waited is None else min(100.0, 100 * waited / step)


@dataclass(frozen=True)
class GpuSample:
    """The state of one GPU; None for each value that the driver does not give.

    Attributes:
        use: percent of the time in which a kernel ran.
        memory: bytes in use.
        power: watts.
        temperature: degrees Celsius.
        sm_clock, memory_clock: MHz.
        ecc: uncorrected ECC errors since the driver was loaded.
        xid: the latest XID error code since the start of the job; 0 for none.
    """

    use: float | None = None
    memory: int | None = None
    power: float | None = None
    temperature: float | None = None
    sm_clock: int | None = None
    memory_clock: int | None = None
    ecc: int | None = None
    xid: int | None = None


@dataclass(frozen=True)
class Gpu:
    """A GPU of a node: its index, its UUID, its name and its memory in bytes."""

    index: int
    uuid: str
    name: str
    memory: int


@dataclass(frozen=True)
class NodeFacts:
    """What does not change during an attempt.

    Attributes:
        node_rank, host: the node.
        attempt: the number of the job's attempt.
        cores: the cores that the job may use.
        memory: bytes of memory that the job may use.
        gpus: the GPUs that the job may use.
    """

    node_rank: int
    host: str
    attempt: int
    cores: int
    memory: int
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One sample of a node.

    Attributes:
        time: seconds since the epoch, by the node's clock; for display only.
        monotonic: seconds of the node's monotonic clock; differences are durations.
        restart: the round of the workers.
        quiet: seconds since the last output, or the last ``ctx.heartbeat()``, of a worker.
        cpu: percent of one core, all processes of the machine.
        memory: bytes in use on the machine, or in the job's control group.
        load: the load average of one minute.
        received, sent: bytes per second through the network.
        read, written: bytes per second from and to disks.
        workers: the workers by rank.
        gpus: the GPUs, in the order of `NodeFacts.gpus`.
    """

    time: float
    monotonic: float
    restart: int
    quiet: float
    cpu: float
    memory: int
    load: float
    received: float
    sent: float
    read: float
    written: float
    workers: Mapping[int, WorkerSample] = field(default_factory=dict)
    gpus: tuple[GpuSample, ...] = ()
