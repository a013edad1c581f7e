"""Facts that each rank writes to the store in the rendezvous, and why two ranks do not fit."""

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
