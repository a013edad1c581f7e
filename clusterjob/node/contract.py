"""The contract between the two halves: the variables that a worker finds, and the CLUSTERJOB_* that
a node's script sets.

Torch's own names come first, so that a script that never heard of clusterjob runs under it.
Source: https://docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables". Then
PaddlePaddle's (`paddle`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterjob.errors import PlaceError
from clusterjob.node.environments import paddle_endpoints
from clusterjob.node.system import network

JOB_ID = "CLUSTERJOB_JOB_ID"
JOB_DIR = "CLUSTERJOB_JOB_DIR"
ATTEMPT = "CLUSTERJOB_ATTEMPT"
TOKEN = "CLUSTERJOB_TOKEN"
TOKEN_FILE = "CLUSTERJOB_TOKEN_FILE"
SECRETS_FILE = "CLUSTERJOB_SECRETS_FILE"
ARRAY_INDEX = "CLUSTERJOB_ARRAY_INDEX"
REPORT_FD = "CLUSTERJOB_REPORT_FD"
WARNING_FD = "CLUSTERJOB_WARNING_FD"
STORE_KEY = "CLUSTERJOB_STORE_KEY"  # signs what ranks leave in torch's store for each other
STDIN_FD = "CLUSTERJOB_STDIN_FD"  # of the node's agent: a descriptor that is to be rank 0's stdin
STORE = "CLUSTERJOB_STORE"  # host:port of the store that agents serve; empty where rank 0 serves it
STREAM = "CLUSTERJOB_STREAM"  # "1": the submitter sees this node's stdout alone; see `numbered`
_RESTARTS = "SLURM_RESTART_COUNT"

# What a launcher sets for its workers; a job started from inside another must not inherit them.
LAUNCH_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", *paddle_endpoints.VARIABLES,
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
        first_rank: rank of this node's local rank 0 (nodes may differ in size, so it is a prefix
            sum).
        world_size: workers of the job.
        gpus: GPUs that a worker of this node sees.
        paddle_master: where PaddlePaddle's rank 0 listens; empty where no ports are held for its
            processes.
        endpoints: of all workers, by rank and separated by commas; empty where they are too many.
        own_endpoints: of this node's workers.
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
    gpus: int = 0
    paddle_master: str = ""
    endpoints: str = ""
    own_endpoints: str = ""


def worker_variables(
    world: World, local_rank: int, job_id: str, max_restarts: int
) -> dict[str, str]:
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
        # Every rank is then a client: plain env:// scripts work unchanged and the store outlives
        # rank 0.
        "TORCHELASTIC_USE_AGENT_STORE": str(world.agent_store),
    } | _of_paddle(world, local_rank, rank=rank)


def store_address(world: World, launcher: str) -> str:
    """Return where agents, ours or torchrun's, serve torch's store: ``host:port``; empty where rank
    0 is to serve it.
    """
    return (
        f"{world.master_addr}:{world.master_port}"
        if world.agent_store or launcher == "torchrun"
        else ""
    )


def _of_paddle(world: World, local_rank: int, rank: str) -> dict[str, str]:
    """Return what PaddlePaddle's processes read, where ports are held for them."""
    own = world.own_endpoints.split(",")
    if not world.paddle_master or len(own) != world.nproc:
        return {}
    variables = {
        "PADDLE_TRAINER_ID": rank,
        "PADDLE_TRAINERS_NUM": str(world.world_size),
        "PADDLE_MASTER": world.paddle_master,  # not torch's port: rank 0 binds this one itself
        "PADDLE_CURRENT_ENDPOINT": own[local_rank],
        "PADDLE_NNODES": str(world.nnodes),
        "PADDLE_RANK_IN_NODE": str(local_rank),
        "PADDLE_LOCAL_RANK": str(local_rank),
        "PADDLE_LOCAL_SIZE": str(world.nproc),
    }
    if world.endpoints:
        variables["PADDLE_TRAINER_ENDPOINTS"] = world.endpoints
    if world.gpus:
        variables["FLAGS_selected_gpus"] = str(
            local_rank % world.gpus
        )  # init_parallel_env() wants it where there are GPUs
    return variables


def quiet_defaults(environ: Mapping[str, str], master_addr: str, nnodes: int) -> dict[str, str]:
    """Return the variables that make torch's start quick and right, each only where the user has
    not set it.

    Args:
        environ: the environment that the workers inherit.
        master_addr: where torch's store listens; the route to it says which interface to use.
        nnodes: nodes of the job.
    """
    # torch's TCPStore does a reverse DNS query per connection and stalls for seconds where no
    # resolver answers.
    wanted = {"RES_OPTIONS": "timeout:1 attempts:1", "PYTHONUNBUFFERED": "1"}
    named = environ.get("MLP_IFNAME", "").strip().strip("'\"")  # a platform's own word
    interface = (
        named
        if named and network.has_interface(named)
        else network.interface_among(master_addr, nnodes)
    )
    if interface:
        # gloo wants one name; NCCL takes a prefix unless it is written with '='.
        wanted |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return {name: value for name, value in wanted.items() if name not in environ}


def thread_defaults(
    environ: Mapping[str, str], nproc: int, cpus_per_task: int | None
) -> dict[str, str]:
    """Return OMP_NUM_THREADS for each worker: its share of this node's cores, unless the user has
    set it.

    It has to be in place before torch is imported: the OpenMP runtime reads it once.

    Args:
        environ: the environment that the workers inherit.
        nproc: workers of this node.
        cpus_per_task: cores per worker as the user asked for them; None for an even share of what
            this process may use.
    """
    if "OMP_NUM_THREADS" in environ:
        return {}
    own = len(os.sched_getaffinity(0))
    if cpus_per_task is None:
        cpus_per_task = (
            own if environ.get("OMPI_MCA_orte_bound_at_launch") == "1" else _cpus_of_a_task(environ)
        )
    return {"OMP_NUM_THREADS": str(cpus_per_task or max(1, own // nproc))}


def _cpus_of_a_task(environ: Mapping[str, str]) -> int | None:
    """Return what Slurm gives each task of a step that starts the workers itself; None where our
    agent does.
    """
    text = environ.get("SLURM_CPUS_PER_TASK", "")
    one_each = environ.get("SLURM_STEP_NUM_TASKS") == environ.get("SLURM_STEP_NUM_NODES")
    return (
        int(text)
        if text.isascii() and text.isdigit() and 0 < len(text) < 6 and not one_each
        else None
    )


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


def store_key(token: bytes, job_id: str, attempt: int, restart: int) -> str:
    """Return the key with which the workers of one round sign what they leave in torch's store;
    every agent makes the same.

    Args:
        token: the job's secret.
        job_id: the job's id.
        attempt: which start of the job this is.
        restart: which round of it.
    """
    import hashlib  # slow to load, and every worker loads this module
    import hmac

    return hmac.new(
        token, f"store\0{job_id}\0{attempt}\0{restart}".encode(), hashlib.sha256
    ).hexdigest()


def read_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``--secret``, from the file that CLUSTERJOB_SECRETS_FILE names; none
    where it names none.

    Raises:
        PlaceError: the file cannot be read.
    """
    path = environ.get(SECRETS_FILE)
    if not path:
        return {}
    try:
        lines = Path(path).read_bytes().split(b"\0")
    except OSError as error:
        raise PlaceError(
            f"the secrets of the job cannot be read: {error.strerror}: {path}"
        ) from error
    return {
        os.fsdecode(name): os.fsdecode(value)
        for name, equals, value in (line.partition(b"=") for line in lines)
        if equals
    }


def read_token(environ: Mapping[str, str]) -> bytes | None:
    """Return the job's secret, which agents prove to each other; None where there is none.

    From CLUSTERJOB_TOKEN, else the file that CLUSTERJOB_TOKEN_FILE names.

    Raises:
        PlaceError: the file cannot be read, or is empty.
    """
    if environ.get(TOKEN):
        return environ[TOKEN].encode(errors="surrogateescape")
    if environ.get(TOKEN_FILE):
        try:
            token = Path(environ[TOKEN_FILE]).read_bytes().strip()
        except OSError as error:
            raise PlaceError(
                f"the job's secret cannot be read: {error.strerror}: {environ[TOKEN_FILE]}"
            ) from error
        if not token:
            raise PlaceError(f"the job's secret is empty: {environ[TOKEN_FILE]}")
        return token
    return None
