"""A failure, a restart by the launcher, the snapshot is read: pytorch/examples, multigpu_torchrun.py under --max-restarts."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
start = torch.load("snapshot.pt", weights_only=True)["epoch"] + 1 if os.path.exists("snapshot.pt") else 0
for epoch in range(start, 3):
    print(f"epoch {epoch} after {os.environ['TORCHELASTIC_RESTART_COUNT']} restarts")
    dist.barrier()
    if rank == 0:
        torch.save({"epoch": epoch}, "snapshot.pt")
    dist.barrier()
    if epoch == 1 and start == 0:
        if rank == 1:
            raise RuntimeError("the machine's card fell off the bus")
        time.sleep(60)
dist.destroy_process_group()
