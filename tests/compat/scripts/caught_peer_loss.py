"""A rank that loses its peer catches the error, saves and ends well: elastic trainers, `except RuntimeError` around the loop."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
try:
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        os._exit(0)
    time.sleep(0.3)
    dist.all_reduce(torch.ones(1))
except RuntimeError:
    with open("rescued.txt", "w") as stream:
        stream.write("checkpoint\n")
