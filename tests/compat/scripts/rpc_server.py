"""A parameter server over torch.distributed.rpc, env:// place: pytorch/examples, distributed/rpc/parameter_server."""

import os

import torch
from torch.distributed import rpc

state = {"weight": torch.zeros(2)}


def add(gradient):
    state["weight"] += gradient
    return state["weight"]


rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rpc.init_rpc("server" if rank == 0 else f"trainer{rank}", rank=rank, world_size=world)
if rank != 0:
    print("weight", rpc.rpc_sync("server", add, args=(torch.ones(2),)).tolist())
rpc.shutdown()
