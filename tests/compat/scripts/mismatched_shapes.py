"""Tensors of different sizes in one collective: padding that one rank forgot, pytorch#22490-like reports."""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=4))
rank = dist.get_rank()
output = [torch.zeros(4) for _ in range(dist.get_world_size())]
dist.all_gather(output, torch.full((4 + 1000000 * rank,), float(rank)))
