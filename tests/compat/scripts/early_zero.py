"""One rank leaves with exit code 0 while the others are in a collective: data that ends sooner on one rank, pytorch#41665."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
batches = 2 if rank == 1 else 4
for _ in range(batches):
    dist.all_reduce(torch.ones(1))
sys.exit(0)
