"""Run some collectives, then do nothing."""

import time

import torch
import torch.distributed as dist

from clusterjob import bootstrap

with bootstrap.init() as ctx:
    for _ in range(5):
        dist.all_reduce(torch.ones(8, device=ctx.device))
    dist.barrier()
    print("waiting", flush=True)
    time.sleep(1000)
