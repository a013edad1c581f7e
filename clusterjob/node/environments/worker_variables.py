"""Variables of workers: defaults for network, output and threads."""

from __future__ import annotations

from collections.abc import Mapping

from clusterjob.node.environments.topology import whole_number
from clusterjob.node.system import devices, network


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
    interface = (
        named
        if named and network.has_interface(named)
        else network.interface_among(master_addr, nnodes)
    )
    if interface:
        # gloo takes one name; NCCL takes a prefix unless the value starts with '='.
        wanted |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return {name: value for name, value in wanted.items() if name not in environ}


def cpu_defaults(environ: Mapping[str, str], gpus: int) -> dict[str, str]:
    """Return variables for workers on the CPU, except those that the user has set.

    Without accelerate's, each worker of accelerate or of transformers' Trainer forms a world of its
    own: accelerate.state.PartialState groups CPU processes only if it is told to use the CPU.

    Args:
        environ: the environment that the workers inherit.
        gpus: number of GPUs that a worker sees.
    """
    if gpus or devices.has_other_accelerator():
        return {}
    if "ACCELERATE_TORCH_DEVICE" in environ or "ACCELERATE_USE_CPU" in environ:
        return {}
    return {"ACCELERATE_USE_CPU": "true"}


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
