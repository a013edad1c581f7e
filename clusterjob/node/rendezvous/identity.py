"""What a node knows of its job: its place, its options, the secret of all agents.

The agent's node needs it before asyncio is imported.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
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
        key: drawn by this node; only who has it can join again as this node.
        is_open: whether the token is no secret: the user gave none.
        peers: the names of all nodes; an open job accepts agents from their addresses only. Empty
            for any address.
    """

    job_id: str
    attempt: int
    token: bytes = field(repr=False)
    ports: list[int]
    has_torch: bool
    key: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    is_open: bool = False
    peers: tuple[str, ...] = ()


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
