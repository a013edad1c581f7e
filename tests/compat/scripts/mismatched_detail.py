"""TORCH_DISTRIBUTED_DEBUG=DETAIL names the mismatch: the documentation of torch.distributed, "Debugging torch.distributed applications"."""

import os

os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(10))
else:
    dist.reduce(torch.ones(10), dst=0)
