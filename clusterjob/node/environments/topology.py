"""Define `Topology`, a node's rank assignment, and `Worker`, a process's rank assignment.

A platform that starts one command per node gives a `Topology`; a launcher then starts the workers.
A platform that starts one command per process gives a `Worker`. With two types, node ranks are not
used as process ranks by mistake.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterjob.errors import PlacementError


@dataclass(frozen=True)
class Topology:
    """The rank assignment of one node of a job.

    Attributes:
        nnodes: number of nodes, at least 1.
        node_rank: this node's index, 0 to nnodes - 1.
        nproc_per_node: number of workers on this node; None if the environment does not give it.
        master_addr: host name or address at which the other nodes reach node 0.
        master_port: TCP port on node 0 that the platform reserved; None if it gives none.
        source: the family of variables that was read.

    Raises:
        PlacementError: a number is out of range, or the master has no address.
    """

    nnodes: int
    node_rank: int
    nproc_per_node: int | None
    master_addr: str
    master_port: int | None
    source: str

    def __post_init__(self) -> None:
        if self.nnodes < 1:
            raise PlacementError(f"nnodes is {self.nnodes}: a job has at least 1 node")
        if not 0 <= self.node_rank < self.nnodes:
            raise PlacementError(
                f"node_rank is {self.node_rank}, outside 0..{self.nnodes - 1} (nnodes is "
                f"{self.nnodes})"
            )
        if self.nproc_per_node is not None and self.nproc_per_node < 1:
            raise PlacementError(
                f"nproc_per_node is {self.nproc_per_node}: a node has at least 1 worker"
            )
        if self.master_port is not None and not 0 < self.master_port < 65536:
            raise PlacementError(f"master_port is {self.master_port}, outside 1..65535")
        if not self.master_addr:
            raise PlacementError("master_addr is empty")


@dataclass(frozen=True)
class Worker:
    """The rank assignment of one process of a job.

    Attributes:
        topology: the node that the process runs on.
        rank: index of the process in the whole job, 0 to world_size - 1.
        local_rank: index of the process on its node, 0 to local_world_size - 1.
        world_size: number of processes in the job.
        local_world_size: number of processes on this node.

    Raises:
        PlacementError: a number is out of range.
    """

    topology: Topology
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise PlacementError(f"world_size is {self.world_size}: a job has at least 1 process")
        if not 0 <= self.rank < self.world_size:
            raise PlacementError(
                f"rank is {self.rank}, outside 0..{self.world_size - 1} (world_size is "
                f"{self.world_size})"
            )
        if not 1 <= self.local_world_size <= self.world_size:
            raise PlacementError(
                f"local_world_size is {self.local_world_size}, outside 1..{self.world_size}"
            )
        if not 0 <= self.local_rank < self.local_world_size:
            raise PlacementError(
                f"local_rank is {self.local_rank}, outside 0..{self.local_world_size - 1} "
                f"(local_world_size is {self.local_world_size})"
            )
