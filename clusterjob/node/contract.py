"""The contract between the two halves: the variables that a worker finds, and the CLUSTERJOB_* that a node's script sets.

Torch's own names come first, so that a script that never heard of clusterjob runs under it.
Source: https://docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables".
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterjob.errors import PlaceError
from clusterjob.node import network

JOB_ID = "CLUSTERJOB_JOB_ID"
JOB_DIR = "CLUSTERJOB_JOB_DIR"
ATTEMPT = "CLUSTERJOB_ATTEMPT"
TOKEN = "CLUSTERJOB_TOKEN"
TOKEN_FILE = "CLUSTERJOB_TOKEN_FILE"
REPORT_FD = "CLUSTERJOB_REPORT_FD"
_RESTARTS = "SLURM_RESTART_COUNT"

# What a launcher sets for its workers; a job started from inside another must not inherit them.
LAUNCH_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE",
)  # fmt: skip


@dataclass(frozen=True)
class World:
    """What the lead tells every agent when the workers are to start: one round of the job.

    Attributes:
        restart: how often the workers were started before, from 0.
        master_addr, master_port: where torch's store listens.
        agent_store: whether that store is served by node 0's agent; else rank 0 serves it.
        node_rank, nnodes: this node's place.
        nproc: workers of this node.
        first_rank: rank of this node's local rank 0 (nodes may differ in size, so it is a prefix sum).
        world_size: workers of the job.
    """

    restart: int
    master_addr: str
    master_port: int
    agent_store: bool
    node_rank: int
    nnodes: int
    nproc: int
    first_rank: int
    world_size: int


def worker_variables(world: World, local_rank: int, job_id: str, max_restarts: int) -> dict[str, str]:
    """Return the variables that tell one worker its place.

    Args:
        world: the round that the worker belongs to.
        local_rank: the worker's index on this node.
        job_id: the job's id, which torch calls the run id.
        max_restarts: how often the workers may be started again.
    """
    rank = str(world.first_rank + local_rank)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world.world_size),
        "LOCAL_WORLD_SIZE": str(world.nproc),
        "GROUP_RANK": str(world.node_rank),
        "GROUP_WORLD_SIZE": str(world.nnodes),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": str(world.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": world.master_addr,
        "MASTER_PORT": str(world.master_port),
        "TORCHELASTIC_RUN_ID": job_id,
        "TORCHELASTIC_RESTART_COUNT": str(world.restart),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        # Every rank is then a client: plain env:// scripts work unchanged and the store outlives rank 0.
        "TORCHELASTIC_USE_AGENT_STORE": str(world.agent_store),
    }


def quiet_defaults(environ: Mapping[str, str], master_addr: str) -> dict[str, str]:
    """Return the variables that make torch's start quick and right, each only where the user has not set it.

    Args:
        environ: the environment that the workers inherit.
        master_addr: where torch's store listens; the route to it says which interface to use.
    """
    # torch's TCPStore does a reverse DNS query per connection and stalls for seconds where no resolver answers.
    wanted = {"RES_OPTIONS": "timeout:1 attempts:1", "PYTHONUNBUFFERED": "1"}
    interface = network.interface_towards(master_addr)
    if interface:
        # gloo wants one name; NCCL takes a prefix unless it is written with '='.
        wanted |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return {name: value for name, value in wanted.items() if name not in environ}


def thread_defaults(environ: Mapping[str, str], nproc: int, cpus_per_task: int | None) -> dict[str, str]:
    """Return OMP_NUM_THREADS for each worker: its share of this node's cores, unless the user has set it.

    It has to be in place before torch is imported: the OpenMP runtime reads it once.

    Args:
        environ: the environment that the workers inherit.
        nproc: workers of this node.
        cpus_per_task: cores per worker as the user asked for them; None for an even share of what this process may use.
    """
    if "OMP_NUM_THREADS" in environ:
        return {}
    share = cpus_per_task or max(1, len(os.sched_getaffinity(0)) // nproc)
    return {"OMP_NUM_THREADS": str(share)}


def read_attempt(environ: Mapping[str, str]) -> int:
    """Return which start of the whole job this is, from 0.

    Raises:
        PlaceError: CLUSTERJOB_ATTEMPT, or else SLURM_RESTART_COUNT, is no whole number.
    """
    variable = ATTEMPT if environ.get(ATTEMPT) else _RESTARTS  # a requeued job keeps its id
    text = environ.get(variable) or "0"
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise PlaceError(f"{variable}={text[:80]!r} is not a whole number")
    return int(text)


def read_token(environ: Mapping[str, str], identity: str) -> bytes:
    """Return the job's secret, which agents prove to each other.

    From CLUSTERJOB_TOKEN, else the file that CLUSTERJOB_TOKEN_FILE names, else derived from the job's identity: that one
    keeps jobs apart and is no secret.

    Raises:
        PlaceError: the file cannot be read.
    """
    if environ.get(TOKEN):
        return environ[TOKEN].encode(errors="surrogateescape")
    if environ.get(TOKEN_FILE):
        try:
            return Path(environ[TOKEN_FILE]).read_bytes().strip()
        except OSError as error:
            raise PlaceError(f"the job's secret cannot be read: {error.strerror}: {environ[TOKEN_FILE]}") from error
    return f"clusterjob:{identity}".encode()
