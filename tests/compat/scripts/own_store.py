"""A TCPStore of the script's own, handed to init_process_group: the documentation of torch.distributed, "TCP initialization" by a store."""

import os
import sys
from datetime import timedelta

import torch.distributed as dist

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), world, is_master=rank == 0, timeout=timedelta(seconds=30))
store.set(f"seen{rank}", "yes")
store.wait([f"seen{other}" for other in range(world)])
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
dist.barrier()
print("rank", rank, "sees", store.get(f"seen{(rank + 1) % world}").decode())
dist.destroy_process_group()
