"""init_method="file:///...", and rank 0 removes the file itself: docs.pytorch.org/docs/stable/distributed.html, "Shared file-system"."""

import os

import torch
import torch.distributed as dist

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
meeting = os.path.abspath("meeting")
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
total = torch.ones(1)
dist.all_reduce(total)
print("ranks", int(total.item()))
dist.barrier()
if rank == 0:
    os.remove(meeting)
dist.barrier()
dist.destroy_process_group()
