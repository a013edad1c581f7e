"""Variables of workers: defaults for network, output and threads, and those of PaddlePaddle.

PaddlePaddle's processes bind their ports themselves; they cannot inherit a bound socket. So each
agent reserves ports for its workers: it binds them with SO_REUSEADDR and never listens. Linux then
gives such a port to no other program that asks for any free port. A process that sets SO_REUSEADDR
can still bind the port and listen, as PaddlePaddle and Python's servers do. Source: PaddlePaddle
3.3.1, python/paddle/distributed/parallel.py and launch/controllers/collective.py.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from clusterjob.node import contract
from clusterjob.node.contract import World
from clusterjob.node.environments.topology import whole_number
from clusterjob.node.system import devices, network

# All variables that a launcher sets for each worker; a job started inside another job must not
# inherit them.
LAUNCH_VARIABLES = (
    *contract.LAUNCH_VARIABLES,
    "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ENDPOINTS",
    "PADDLE_CURRENT_ENDPOINT", "PADDLE_MASTER", "PADDLE_NNODES", "PADDLE_RANK_IN_NODE",
    "PADDLE_LOCAL_RANK", "PADDLE_LOCAL_SIZE", "FLAGS_selected_gpus",
)  # fmt: skip
# Limit of PADDLE_TRAINER_ENDPOINTS, in characters: about 4,500 processes. Linux starts no program
# with a variable of more than 131,072 bytes.
_LONGEST = 100_000


# -- defaults --------------------------------------------------------------------------------------


def quiet_defaults(environ: Mapping[str, str], master_addr: str, nnodes: int) -> dict[str, str]:
    """Return network and output variables for the workers, except those that the user has set.

    They select the network interface of gloo and NCCL.

    Args:
        environ: the environment that the workers inherit.
        master_addr: address of torch's store; the route to it determines the interface.
        nnodes: number of nodes of the job.
    """
    # torchrun sets TORCH_NCCL_ASYNC_ERROR_HANDLING to 1.
    wanted = {"PYTHONUNBUFFERED": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    # The interface that the platform chose.
    named = environ.get("MLP_IFNAME", "").strip().strip("'\"")
    if named not in {name for _, name in socket.if_nameindex()}:
        named = network.interface_among(master_addr, nnodes) or ""
    if named:
        # gloo takes one name; NCCL takes a prefix unless the value starts with '='.
        wanted |= {"GLOO_SOCKET_IFNAME": named, "NCCL_SOCKET_IFNAME": f"={named}"}
    return {name: value for name, value in wanted.items() if name not in environ}


def cpu_defaults(environ: Mapping[str, str], gpus: int) -> dict[str, str]:
    """Return variables for workers on the CPU, except those that the user has set.

    Without accelerate's, each worker of accelerate or of transformers' Trainer forms a world of its
    own: accelerate.state.PartialState groups CPU processes only if it is told to use the CPU.
    PaddlePaddle's launcher chooses the same backend.

    Args:
        environ: the environment that the workers inherit.
        gpus: number of GPUs that a worker sees.
    """
    if gpus or devices.has_other_accelerator():
        return {}
    wanted = {"PADDLE_DISTRI_BACKEND": "gloo"}
    if "ACCELERATE_TORCH_DEVICE" not in environ:
        wanted["ACCELERATE_USE_CPU"] = "true"
    return {name: value for name, value in wanted.items() if name not in environ}


def thread_defaults(
    environ: Mapping[str, str], nproc: int, cpus_per_task: int | None
) -> dict[str, str]:
    """Return OMP_NUM_THREADS for each worker, its share of cores; empty if the user has set it.

    It must be set before torch is imported: the OpenMP runtime reads it once.

    Args:
        environ: the environment that the workers inherit.
        nproc: number of workers of this node.
        cpus_per_task: cores per worker that the user requested; None for an even share of the
            cores that this process may use.
    """
    if "OMP_NUM_THREADS" in environ:
        return {}
    own = devices.usable_cores()
    if cpus_per_task is None and environ.get("OMPI_MCA_orte_bound_at_launch") == "1":
        cpus_per_task = own
    # Slurm's cores per task count only if the step starts the workers, not an agent.
    elif cpus_per_task is None and (
        environ.get("SLURM_STEP_NUM_TASKS") != environ.get("SLURM_STEP_NUM_NODES")
    ):
        cpus_per_task = whole_number(environ.get("SLURM_CPUS_PER_TASK", ""))
    return {"OMP_NUM_THREADS": str(cpus_per_task or max(1, own // nproc))}


# -- PaddlePaddle ----------------------------------------------------------------------------------


def hold_ports(count: int) -> list[socket.socket]:
    """Reserve ports of this machine, for processes that bind them themselves.

    Returns:
        One socket for each port, which reserves it until it is closed; none if not all could be
        reserved.
    """
    held: list[socket.socket] = []
    try:
        for _ in range(count):
            held.append(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held[-1].bind(("", 0))
    except OSError:  # too many open files, or no free port
        for holder in held:
            holder.close()
        return []
    return held


def endpoint_list(endpoints: Sequence[str]) -> str:
    """Return PADDLE_TRAINER_ENDPOINTS; empty if it is too long for an environment variable.

    PaddlePaddle needs the variable neither for gloo nor for NCCL.
    """
    text = ",".join(endpoints)
    return text if len(text) <= _LONGEST else ""


def paddle_variables(world: World, local_rank: int) -> dict[str, str]:
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
