"""Tensor, pipeline and data parallel groups on one world, each with a timeout: NVIDIA/Megatron-LM, megatron/core/parallel_state.py."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def print_rank_0(message):
    if dist.get_rank() == 0:
        print(message, flush=True)


rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(minutes=10))
tensor_parallel = 2
tp_group = dp_group = None
for start in range(0, world_size, tensor_parallel):
    ranks = list(range(start, start + tensor_parallel))
    group = dist.new_group(ranks, timeout=timedelta(minutes=10))
    tp_group = group if rank in ranks else tp_group
for offset in range(tensor_parallel):
    ranks = list(range(offset, world_size, tensor_parallel))
    group = dist.new_group(ranks, timeout=timedelta(minutes=10))
    dp_group = group if rank in ranks else dp_group
print_rank_0(f"> initialized tensor model parallel with size {dist.get_world_size(tp_group)}")
value = torch.tensor([float(rank)])
dist.all_reduce(value, group=tp_group)
dist.all_reduce(value, group=dp_group)
print("sum over both", value.item())
dist.barrier()
dist.destroy_process_group()
