"""Provide the endpoints and the rendezvous port that PaddlePaddle's processes need.

PaddlePaddle's processes bind their ports themselves; they cannot inherit a bound socket. So each
agent reserves ports for its workers: it binds them with SO_REUSEADDR and never listens. Linux then
gives such a port to no other program that asks for any free port. A process that sets SO_REUSEADDR
can still bind the port and listen, as PaddlePaddle and Python's servers do.

Source: PaddlePaddle 3.3.1, python/paddle/distributed/parallel.py and
launch/controllers/collective.py.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence

from clusterjob.node import contract
from clusterjob.node.contract import World
from clusterjob.node.environments import scheduler
from clusterjob.node.program import Program
from clusterjob.node.system import network

# Variables set for each worker; a job started inside another job must not inherit them.
VARIABLES = (
    "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ENDPOINTS",
    "PADDLE_CURRENT_ENDPOINT", "PADDLE_MASTER", "PADDLE_NNODES", "PADDLE_RANK_IN_NODE",
    "PADDLE_LOCAL_RANK", "PADDLE_LOCAL_SIZE", "FLAGS_selected_gpus",
)  # fmt: skip
# All variables that a launcher sets for a worker.
LAUNCH_VARIABLES = (*contract.LAUNCH_VARIABLES, *VARIABLES)
_BACKEND = "PADDLE_DISTRI_BACKEND"
# Limit of PADDLE_TRAINER_ENDPOINTS, in characters: about 4,500 processes. Linux starts no program
# with a variable of more than 131,072 bytes.
_LONGEST = 100_000


class HeldPorts:
    """Reserve ports of this machine until `close`, for processes that bind them themselves.

    Attributes:
        ports: the reserved ports; empty if not all could be reserved.
    """

    def __init__(self, count: int) -> None:
        self._holders: list[socket.socket] = []
        with contextlib.suppress(OSError):  # too many open files: `ports` is then empty
            for _ in range(count):
                holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                self._holders.append(holder)
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                holder.bind(("", 0))
        self.ports = [int(holder.getsockname()[1]) for holder in self._holders]
        if len(self.ports) < count or 0 in self.ports:
            self.close()

    def close(self) -> None:
        """Release the ports."""
        for holder in self._holders:
            holder.close()
        self._holders, self.ports = [], []


def own_address(master_addr: str, node_rank: int) -> str:
    """Return the address at which the other nodes reach this one.

    Args:
        master_addr: the address at which all nodes reach node 0.
        node_rank: this node's index.
    """
    return (
        master_addr
        if node_rank == 0
        else network.address_towards(master_addr) or scheduler.node_name()
    )


def may_be_used(program: Program) -> bool:
    """Return whether this node's workers may use PaddlePaddle.

    They may if this interpreter has it, or if the program is a command with its own interpreter.

    Args:
        program: the program of each worker.
    """
    import importlib.util

    return not program.is_python or importlib.util.find_spec("paddle") is not None


def listed(endpoints: Sequence[str]) -> str:
    """Return PADDLE_TRAINER_ENDPOINTS; empty if it is too long for an environment variable.

    PaddlePaddle needs the variable neither for gloo nor for NCCL.
    """
    text = ",".join(endpoints)
    return text if len(text) <= _LONGEST else ""


def backend_default(environ: Mapping[str, str], gpus: int) -> dict[str, str]:
    """Return the backend variable for a node without GPUs, unless the user has set it.

    PaddlePaddle's launcher chooses the same backend.

    Args:
        environ: the environment that the workers inherit.
        gpus: number of GPUs that a worker sees.
    """
    return {} if gpus or _BACKEND in environ else {_BACKEND: "gloo"}


def worker_variables(world: World, local_rank: int) -> dict[str, str]:
    """Return PaddlePaddle's variables of one worker; empty if no ports are reserved for it.

    Args:
        world: the round of the worker.
        local_rank: the worker's index on this node.
    """
    own = world.own_endpoints.split(",")
    if not world.endpoints_master or len(own) != world.nproc:
        return {}
    variables = {
        "PADDLE_TRAINER_ID": str(world.first_rank + local_rank),
        "PADDLE_TRAINERS_NUM": str(world.world_size),
        "PADDLE_MASTER": world.endpoints_master,  # not torch's port: rank 0 binds it itself
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
        )  # init_parallel_env() requires it on a machine with GPUs
    return variables
