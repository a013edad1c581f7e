"""Facts that each rank writes to the store in the rendezvous, and texts about other ranks."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any

from clusterjob.errors import RendezvousError
from clusterjob.node.environments import scheduler
from clusterjob.node.environments.topology import Worker
from clusterjob.node.system import processes
from clusterjob.node.system.sanitize import sanitize
from clusterjob.worker import once_per_host

_MAX_NAMED = 8  # ranks or machines that one text names
_MAX_NAME = 300  # characters of a text that another process wrote


@dataclass(frozen=True)
class Facts:
    """The facts that a process writes to the store in the rendezvous.

    Attributes:
        rank: its rank.
        host, pid, boot: its host name, its pid, and the boot id of its machine.
        world_size: its world size.
        job: its job id; empty if it is unknown.
        versions: versions of torch and of the backend.
        gpu: the UUID of its GPU; empty without one.
        time: its machine's clock, in seconds since 1970.
    """

    rank: int
    host: str
    pid: int
    boot: str
    world_size: int
    job: str
    versions: str
    gpu: str
    time: float

    @classmethod
    def of(cls, data: bytes) -> Facts:
        """Parse the facts of another process; texts are made safe to show on a terminal.

        Raises:
            RendezvousError: the data is not in the format that `data` returns.
        """
        try:
            fields = json.loads(data)
            for name in ("host", "boot", "job", "versions", "gpu"):
                fields[name] = sanitize(fields[name])[:_MAX_NAME]
            if all(type(fields[name]) is int for name in ("rank", "pid", "world_size")):
                return cls(**fields | {"time": float(fields["time"])})
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            pass
        raise RendezvousError(
            "torch's store holds a value that no process of a job writes",
            "another program uses MASTER_ADDR:MASTER_PORT",
        )

    def data(self) -> str:
        """Return the facts in the format that `of` parses."""
        return json.dumps(asdict(self))

    def process(self) -> str:
        """Return the process's host and pid as text."""
        return f"{self.host} (pid {self.pid})"

    def is_same_process(self, other: Facts) -> bool:
        """Return whether both are facts of the same process."""
        return (self.host, self.pid, self.boot) == (other.host, other.pid, other.boot)


def own_facts(worker: Worker, device: Any, backend: str) -> Facts:
    """Return this process's facts.

    Args:
        worker: its rank assignment.
        device: its torch device.
        backend: the backend of the process group that will be made.
    """
    import torch

    versions = f"torch {torch.__version__}"
    gpu = ""
    if device.type == "cuda":
        gpu = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
        if backend == "nccl":
            versions += f" with NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    job = scheduler.job_id(worker.topology.source, os.environ)
    host, boot = socket.gethostname(), processes.boot_id() or ""
    return Facts(
        worker.rank,
        host,
        pid=os.getpid(),
        boot=boot,
        world_size=worker.world_size,
        job=job,
        versions=versions,
        gpu=gpu,
        time=time.time(),
    )


def who(facts: Facts) -> str:
    """Return a rank with its host and pid, as text."""
    return f"rank {facts.rank} on {facts.process()}"


def disagreement(own: Facts, first: Facts) -> tuple[str, str]:
    """Return why two processes cannot be in one job, and a hint; both are empty if they can.

    The result is the same in both processes.
    """
    if own.rank < first.rank:
        own, first = first, own
    if own.world_size != first.world_size:
        return (
            f"{who(own)} counts {own.world_size} processes, {who(first)} counts {first.world_size}",
            "WORLD_SIZE differs among them, or two jobs have the same MASTER_PORT",
        )
    if own.job != first.job:
        return (
            (
                f"{who(own)} is of job {own.job or '(unnamed)'}, "
                f"{who(first)} of job {first.job or '(unnamed)'}"
            ),
            "two jobs have the same MASTER_ADDR and MASTER_PORT: one of them needs another port",
        )
    if own.versions != first.versions:
        return (
            f"{who(own)} has {own.versions}, {who(first)} has {first.versions}",
            "all nodes need the same installation of torch",
        )
    return "", ""


def missing_ranks(store: Any, worker: Worker, key: str = "rank") -> list[int]:
    """Return the ranks whose key, such as ``rank3`` for rank 3, is not in the store."""
    return [rank for rank in range(worker.world_size) if not store.check([f"{key}{rank}"])]


def describe_unresponsive(store: Any, ranks: list[int], how: str) -> str:
    """Return a text about ranks that have joined and no longer answer."""
    known = store.multi_get([f"rank{rank}" for rank in ranks[:_MAX_NAMED]])
    named = [f"{each.rank} on {each.process()}" for each in map(Facts.of, known)]
    return f"{_waiting_for(ranks, named)}: {how}"


def describe_missing(store: Any, worker: Worker, missing: list[int], *, started: bool) -> str:
    """Return a text about missing ranks: their nodes, hosts and probable state.

    Args:
        store: the store of the rendezvous.
        worker: this process's rank assignment.
        missing: the ranks.
        started: whether a launcher has started all ranks.
    """
    size = max(1, worker.local_world_size)
    hosts: dict[int, str] = {}
    for node in dict.fromkeys(rank // size for rank in missing):
        there = [
            rank
            for rank in range(node * size, min(worker.world_size, (node + 1) * size))
            if rank not in missing
        ]
        if there:
            hosts[node] = Facts.of(store.get(f"rank{there[0]}")).host
    named = [
        f"{rank} (node {rank // size}{f', {hosts[rank // size]}' if rank // size in hosts else ''})"
        for rank in missing[:_MAX_NAMED]
    ]
    known = (
        "started, and not yet at init()"
        if started
        else "not seen yet: not started, or still importing"
    )
    return f"{_waiting_for(missing, named)}: {known}"


def _waiting_for(ranks: list[int], named: list[str]) -> str:
    more = f" and {len(ranks) - len(named)} more" if len(ranks) > len(named) else ""
    return f"waiting for rank{'s' if len(ranks) > 1 else ''} {', '.join(named)}{more}"


def report_clock(store: Any, of: Facts, how: str) -> None:
    """Print that a machine's clock is off, once per machine and for up to `_MAX_NAMED` machines."""
    if store.add(f"clock {of.host} {of.boot}", 1) == 1 and store.add("clocks", 1) <= _MAX_NAMED:
        once_per_host.print_line(f"the clock of {of.process()}, rank {of.rank}, is {how}")


def whose(facts: Facts) -> str:
    """Return the owner of a clock, as text: ``rank 0's`` or ``that of rank 3 (...)``."""
    return "rank 0's" if facts.rank == 0 else f"that of {who(facts)}"
