"""Collectives in different order on the ranks: `if rank == 0: dist.barrier()` around validation."""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=3))
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    dist.barrier()
dist.all_reduce(torch.ones(1))
