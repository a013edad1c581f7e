"""Ranks end at different times after destroy_process_group: rank 0 alone writes the report."""

import time

import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    time.sleep(1)
    with open("report.txt", "w") as stream:
        stream.write("accuracy 1.0\n")
    print("report written")
