"""init_distributed_device: the place by several launchers' variables: huggingface/pytorch-image-models, timm/utils/distributed.py."""

import logging
import os

import torch
import torch.distributed as dist

_logger = logging.getLogger("train")


def world_info_from_env():
    found = []
    for names in (
        ("LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("RANK", "PMI_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"),
        ("WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"),
    ):
        found.append(next((int(os.environ[name]) for name in names if name in os.environ), 0))
    return found


def reduce_tensor(tensor, n):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    return rt / n


logging.basicConfig(level=logging.INFO, format="%(message)s")
local_rank, global_rank, world_size = world_info_from_env()
dist.init_process_group(backend="gloo", init_method="env://")
assert (dist.get_rank(), dist.get_world_size()) == (global_rank, world_size)
_logger.info("Training in distributed mode with multiple processes. Process %d, total %d.", global_rank, world_size)
print("loss", reduce_tensor(torch.tensor(float(global_rank)), world_size).item(), "local", local_rank)
