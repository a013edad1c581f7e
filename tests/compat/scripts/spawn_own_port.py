"""mp.spawn with an address and a port of its own: pytorch/tutorials, intermediate_source/ddp_tutorial.rst."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = sys.argv[1]
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def demo_basic(rank, world_size):
    setup(rank, world_size)
    model = DDP(nn.Linear(10, 5))
    nn.MSELoss()(model(torch.randn(20, 10)), torch.randn(20, 5)).backward()
    open(f"child{rank}.txt", "w").write(f"rank {rank} of {world_size}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(demo_basic, args=(2,), nprocs=2, join=True)
    print("both children have ended")
