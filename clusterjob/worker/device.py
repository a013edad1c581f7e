"""The device of a worker process, and the backend that fits it: what torch sees here, and whether
it is meant to be used.
"""

from __future__ import annotations

from clusterjob.errors import PlaceError, UsageError
from clusterjob.node.environments import slurm_env
from clusterjob.node.environments.topology import Worker

BACKENDS = ("nccl", "gloo")


def accelerators() -> tuple[str, int]:
    """Return torch's name for this machine's GPUs, and how many it sees and can use. ROCm's are
    cuda to torch.
    """
    import torch

    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return kind, int(module.device_count())
    return "cuda", 0


def choose_backend(asked: str | None, gpus: int, kind: str = "cuda") -> str:
    """Return the backend for a machine.

    Args:
        asked: what the script wants; None for the default.
        gpus: GPUs that torch sees and can use.
        kind: torch's name for them: ``cuda``, which AMD's are called too, or ``xpu``.

    Raises:
        UsageError: nccl without a GPU.
    """
    if asked == "nccl" and not (gpus and kind == "cuda"):
        raise UsageError(
            "the backend nccl needs a GPU, and torch sees none (torch.cuda.is_available() is False)"
        )
    return asked or ("nccl" if gpus and kind == "cuda" else "gloo")


def choose_device(local_rank: int, gpus: int, kind: str = "cuda") -> str:
    """Return the name of a process's device: cpu, or the GPU of its local rank among those that it
    sees.

    Args:
        local_rank: index of the process on its node.
        gpus: GPUs that torch sees and can use. One, where the launcher shows each process only its
            own (mace#435).
        kind: torch's name for them.
    """
    return f"{kind}:{local_rank % gpus}" if gpus else "cpu"


def check_gpus(worker: Worker | None, gpus: int, *, process_group: bool | None) -> None:
    """Refuse a task of srun that is alone on its node and sees several GPUs: all but one would stay
    idle, silently.

    Args:
        worker: this process's place.
        gpus: how many GPUs it sees.
        process_group: what the script asked for; False says that one process is meant to use them
            all.

    Raises:
        PlaceError: it is such a task.
    """
    alone = (
        worker is not None
        and worker.topology.source == slurm_env.SOURCE
        and worker.topology.nproc_per_node is None
    )
    if alone and gpus > 1 and process_group is not False:
        raise PlaceError(
            f"srun started one process on this node, which sees {gpus} GPUs: all but one would be idle",
            f"start this node's processes with `srun ... clusterjob launch --nproc-per-node {gpus} SCRIPT`, or have srun start them with "
            f"--ntasks-per-node={gpus}; CLUSTERJOB_NPROC_PER_NODE=1 says that one is meant",
        )
