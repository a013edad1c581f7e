"""Uneven inputs under the Join context: pytorch/tutorials, advanced_source/generic_join.rst."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(torch.nn.Linear(1, 1))
done = 0
with Join([model]):
    for value in [torch.ones(1) for _ in range(5 + rank)]:
        model(value).sum().backward()
        done += 1
print(f"Rank {rank} has exhausted all {done} of its inputs!")
