"""Rank 0 saves, all wait at a barrier and load: pytorch/tutorials, demo_checkpoint of the DDP tutorial."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def demo_checkpoint():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(torch.nn.Linear(4, 4))
    if rank == 0:
        torch.save(model.state_dict(), "model.checkpoint")
    dist.barrier()
    model.load_state_dict(torch.load("model.checkpoint", map_location="cpu", weights_only=True))
    model(torch.ones(1, 4)).sum().backward()
    dist.barrier()
    if rank == 0:
        os.remove("model.checkpoint")
    print("rank", rank, "loaded")
    dist.destroy_process_group()


demo_checkpoint()
