"""Define `Resources`, what a job requests from a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from clusterjob.errors import SpecError

MOST_NODES = 20_000  # of one job; a larger number in an untrusted file would exhaust the memory
MOST_WORKERS = 4096  # of one node


@dataclass(frozen=True)
class Resources:
    """The resources that a job requests from a cluster.

    Attributes:
        nodes: number of machines, spare ones included.
        gpus_per_node: GPUs on each node; None if the job does not request GPUs.
        gpu_type: GPU type, as the cluster names it; empty for any.
        cpus_per_task: cores per worker; None for an even share of the node's cores.
        mem: memory per node in bytes; 0 for all of it, None for the cluster's default.
        time_limit: time limit in seconds; None for the cluster's default.
    """

    nodes: int = 1
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    mem: int | None = None
    time_limit: int | None = None
    gpu_type: str = ""

    def __post_init__(self) -> None:
        for flag, value, least, most in (
            ("--nodes", self.nodes, 1, MOST_NODES),
            ("--gpus", self.gpus_per_node, 0, MOST_WORKERS),
            ("--cpus-per-task", self.cpus_per_task, 1, None),
            ("--mem", self.mem, 0, None),
            ("--time", self.time_limit, 1, None),
        ):
            at_least(flag, value, least=least, most=most)


def at_least(flag: str, value: int | None, least: int, most: int | None = None) -> None:
    """Check that an option's value is neither too small nor too large; None is neither.

    Raises:
        SpecError: it is.
    """
    if value is not None and most is not None and value > most:
        raise SpecError(f"{flag} {value}: the greatest value is {most}")
    if value is not None and value < least:
        raise SpecError(
            f"{flag} {value}: the least value is {least}",
            f"write {flag} {least} or more, or leave it out",
        )
