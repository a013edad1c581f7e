"""Environment variables of a worker, and CLUSTERJOB_* variables set by a node's script.

They are the contract between the submit half and the node half. Workers get torch's own variables,
so a script that does not know clusterjob runs under it. Source:
https://docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables". They also get
variables of other frameworks (`worker_variables`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterjob.errors import PlacementError

JOB_ID = "CLUSTERJOB_JOB_ID"
JOB_DIR = "CLUSTERJOB_JOB_DIR"
ATTEMPT = "CLUSTERJOB_ATTEMPT"
TOKEN = "CLUSTERJOB_TOKEN"
TOKEN_FILE = "CLUSTERJOB_TOKEN_FILE"
SECRETS_FILE = "CLUSTERJOB_SECRETS_FILE"
NOTIFICATIONS = "CLUSTERJOB_NOTIFICATIONS"  # JSON: where node 0 sends notifications; a secret
ARRAY_INDEX = "CLUSTERJOB_ARRAY_INDEX"
REPORT_FD = "CLUSTERJOB_REPORT_FD"
WARNING_FD = "CLUSTERJOB_WARNING_FD"
RAY_TOKEN = "CLUSTERJOB_RAY_TOKEN"  # of the Ray cluster of one round
STDIN_FD = "CLUSTERJOB_STDIN_FD"  # set for the agent: the descriptor that becomes rank 0's stdin
STORE = "CLUSTERJOB_STORE"  # host:port of the agents' store; empty if rank 0 serves the store
CODE_DIR = "CLUSTERJOB_CODE_DIR"  # the submitted code of the working directory
CODE_TREE = "CLUSTERJOB_CODE_TREE"  # the submitted code; empty if there is none
WAITS = "CLUSTERJOB_WAITS"  # "1": a worker measures how long it waits in collectives
STREAM = "CLUSTERJOB_STREAM"  # "1": the submitter sees only this node's stdout; see `console`

# Events of --notify-on.
NOTIFY_KINDS = ("start", "end", "failure", "requeue")

_TOKEN_BYTES = 16  # minimum length of a token

# Variables set for each worker; a job started inside another job must not inherit them.
LAUNCH_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE",
)  # fmt: skip


@dataclass(frozen=True)
class World:
    """One round of the job, which the coordinator sends to every agent to start the workers.

    Attributes:
        restart: number of earlier starts of the workers.
        master_addr, master_port: address and port of torch's store.
        agent_store: whether node 0's agent serves that store; otherwise rank 0 serves it.
        node_rank, nnodes: rank of this node, and number of nodes.
        nproc: number of workers of this node.
        first_rank: rank of this node's local rank 0 (a prefix sum, because nodes may have
            different numbers of workers).
        world_size: number of workers of the job.
        gpus: number of GPUs that a worker of this node sees.
        endpoints_master: ``host:port`` that rank 0 binds itself, for a framework that needs it;
            empty if no ports are reserved.
        endpoints: endpoints of all workers, by rank, separated by commas; empty if the list is too
            long for a variable.
        own_endpoints: endpoints of this node's workers, in the same form.
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
    endpoints_master: str = ""
    endpoints: str = ""
    own_endpoints: str = ""


def worker_variables(
    world: World, local_rank: int, job_id: str, max_restarts: int
) -> dict[str, str]:
    """Return the variables that give one worker its rank and the address of torch's store.

    Args:
        world: the round that the worker belongs to.
        local_rank: the worker's index on this node.
        job_id: the job's id, which torch calls the run id.
        max_restarts: maximum number of restarts of the workers.
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
        # If True, every rank is a client: env:// scripts work unchanged, and the store outlives
        # rank 0.
        "TORCHELASTIC_USE_AGENT_STORE": str(world.agent_store),
    }


def read_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``--secret``.

    They come from the file that CLUSTERJOB_SECRETS_FILE names. The result is empty if that variable
    is not set.

    Raises:
        PlacementError: the file cannot be read.
    """
    content = _read_file(environ, SECRETS_FILE, "secrets")
    pairs = [line.partition(b"=") for line in (content or b"").split(b"\0")]
    return {os.fsdecode(name): os.fsdecode(value) for name, equals, value in pairs if equals}


def read_token(environ: Mapping[str, str]) -> bytes | None:
    """Return the job's secret, with which agents authenticate to each other; None if not set.

    It comes from CLUSTERJOB_TOKEN, otherwise from the file that CLUSTERJOB_TOKEN_FILE names.

    Raises:
        PlacementError: the file cannot be read, or the token is shorter than 16 bytes.
    """
    value = environ.get(TOKEN, "").encode(errors="surrogateescape")
    token = (value or _read_file(environ, TOKEN_FILE, "token") or b"").strip()
    if not token and not environ.get(TOKEN_FILE):
        return None
    if len(token) < _TOKEN_BYTES:
        raise PlacementError(
            f"{TOKEN if value else TOKEN_FILE}: the token has {len(token)} bytes:"
            f" it must have at least {_TOKEN_BYTES}",
            "`openssl rand -hex 32` makes one",
        )
    return token


def _read_file(environ: Mapping[str, str], variable: str, content: str) -> bytes | None:
    """Return the content of the file that a variable names; None if the variable is not set."""
    path = environ.get(variable)
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise PlacementError(
            f"{variable}={path}: the job's {content} cannot be read: {error.strerror}"
        ) from error
