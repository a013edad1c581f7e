"""Choose the device of a worker process and the backend of its process group."""

from __future__ import annotations

from clusterjob.errors import PlacementError, UsageError
from clusterjob.node.environments import slurm_env
from clusterjob.node.environments.topology import Worker

BACKENDS = ("nccl", "gloo")


def accelerators() -> tuple[str, int]:
    """Return torch's device type for this machine's GPUs, and the number that torch can use.

    torch calls ROCm's GPUs ``cuda`` too.
    """
    import torch

    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return kind, int(module.device_count())
    return "cuda", 0


def choose_backend(asked: str | None, gpus: int, kind: str = "cuda") -> str:
    """Return the backend of the process group on this machine.

    Args:
        asked: the backend that the script requests; None for the default.
        gpus: number of GPUs that torch can use.
        kind: torch's device type for them: ``cuda`` (also for AMD) or ``xpu``.

    Raises:
        UsageError: nccl is requested, but torch cannot use any GPU.
    """
    if asked == "nccl" and not (gpus and kind == "cuda"):
        raise UsageError(
            "the backend nccl needs a GPU, and torch sees none (torch.cuda.is_available() is False)"
        )
    return asked or ("nccl" if gpus and kind == "cuda" else "gloo")


def choose_device(local_rank: int, gpus: int, kind: str = "cuda") -> str:
    """Return the name of a process's device: ``cpu``, or the GPU with its local rank.

    Args:
        local_rank: index of the process on its node.
        gpus: number of GPUs that torch can use. It is 1 if the launcher shows each process only
            its own GPU (mace#435).
        kind: torch's device type for them.
    """
    return f"{kind}:{local_rank % gpus}" if gpus else "cpu"


def check_gpus(worker: Worker | None, gpus: int, *, process_group: bool | None) -> None:
    """Refuse a single srun task on a node with several GPUs: all but one would be idle.

    Args:
        worker: this process's rank assignment.
        gpus: number of GPUs that it sees.
        process_group: argument of `init`; False means that one process uses all GPUs on purpose.

    Raises:
        PlacementError: this process is such a task.
    """
    alone = (
        worker is not None
        and worker.topology.source == slurm_env.SOURCE
        and worker.topology.nproc_per_node is None
    )
    if alone and gpus > 1 and process_group is not False:
        raise PlacementError(
            f"srun started one process on this node, which sees {gpus} GPUs: "
            "all but one would be idle",
            f"run `srun ... clusterjob launch --nproc-per-node {gpus} SCRIPT`, "
            f"or srun with --ntasks-per-node={gpus}; "
            "set CLUSTERJOB_NPROC_PER_NODE=1 if one process is intended",
        )
