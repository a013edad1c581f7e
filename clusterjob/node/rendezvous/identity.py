"""What a node knows of its job: its place, its options, the secret of all agents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clusterjob.node.environments.topology import Topology
from clusterjob.node.options import LaunchOptions


@dataclass(frozen=True)
class JobIdentity:
    """The data that an agent needs to join a job.

    Attributes:
        job_id: the job's id.
        attempt: the number of the job's attempt, from 0; agents of other attempts are refused.
        token: the job's secret; never in argv, logs or records.
        ports: the ports at which node 0 may listen, in order.
        has_torch: whether this node's interpreter finds torch and can serve its store.
        counted_by: the platform's variable from which node_rank was read; empty if the user set it.
            A platform may have several such variables; all nodes must use the same one.
    """

    job_id: str
    attempt: int
    token: bytes
    ports: list[int]
    has_torch: bool
    counted_by: str = ""

    def __repr__(self) -> str:
        return f"JobIdentity({self.job_id!r}, attempt={self.attempt})"


@dataclass(frozen=True)
class NodeJob:
    """The job, as one node sees it.

    Attributes:
        topology: this node.
        options: the node's options.
        identity: the job's identity and secret.
        directory: the job's directory, as this node sees it.
        print_line: prints one line for the user.
    """

    topology: Topology
    options: LaunchOptions
    identity: JobIdentity
    directory: Path
    print_line: Callable[[str], None]
