"""One node's place in a job, and one process's place: two types on purpose.

A platform that starts one command per node gives a `Topology` (a launcher is still needed); one that starts a command per
process gives a `Worker`. Mixing the two up is the classic bug of distributed launching.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterjob.errors import PlaceError


@dataclass(frozen=True)
class Topology:
    """One node's place in a job.

    Attributes:
        nnodes: number of nodes, at least 1.
        node_rank: this node's index, 0 to nnodes - 1.
        nproc_per_node: number of workers on this node; None when the environment does not say.
        master_addr: host name or address of node 0 as the other nodes reach it.
        master_port: TCP port on node 0 that the platform set aside; None when it names none.
        source: the family of variables that this was read from.

    Raises:
        PlaceError: a number is out of range, or the master has no address.
    """

    nnodes: int
    node_rank: int
    nproc_per_node: int | None
    master_addr: str
    master_port: int | None
    source: str

    def __post_init__(self) -> None:
        if self.nnodes < 1:
            raise PlaceError(f"nnodes is {self.nnodes}: a job has at least 1 node")
        if not 0 <= self.node_rank < self.nnodes:
            raise PlaceError(f"node_rank is {self.node_rank}, outside 0..{self.nnodes - 1} (nnodes is {self.nnodes})")
        if self.nproc_per_node is not None and self.nproc_per_node < 1:
            raise PlaceError(f"nproc_per_node is {self.nproc_per_node}: a node has at least 1 worker")
        if self.master_port is not None and not 0 < self.master_port < 65536:
            raise PlaceError(f"master_port is {self.master_port}, outside 1..65535")
        if not self.master_addr:
            raise PlaceError("master_addr is empty")


@dataclass(frozen=True)
class Worker:
    """One process's place in a job.

    Attributes:
        topology: the place of the node that the process runs on.
        rank: index of the process in the whole job, 0 to world_size - 1.
        local_rank: index of the process on its node, 0 to local_world_size - 1.
        world_size: number of processes in the job.
        local_world_size: number of processes on this node.

    Raises:
        PlaceError: a number is out of range.
    """

    topology: Topology
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise PlaceError(f"world_size is {self.world_size}: a job has at least 1 process")
        if not 0 <= self.rank < self.world_size:
            raise PlaceError(f"rank is {self.rank}, outside 0..{self.world_size - 1} (world_size is {self.world_size})")
        if not 1 <= self.local_world_size <= self.world_size:
            raise PlaceError(f"local_world_size is {self.local_world_size}, outside 1..{self.world_size}")
        if not 0 <= self.local_rank < self.local_world_size:
            raise PlaceError(
                f"local_rank is {self.local_rank}, outside 0..{self.local_world_size - 1} (local_world_size is {self.local_world_size})"
            )
