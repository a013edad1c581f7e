"""Keys of the script's own in the group's store: Lightning-AI/pytorch-lightning and torch.distributed.checkpoint use _get_default_store."""

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

dist.init_process_group("gloo")
store = _get_default_store()
rank = dist.get_rank()
if rank == 0:
    store.set("run_name", "blue-7")
print("name", store.get("run_name").decode())
store.add("arrived", 1)
dist.barrier()
print("arrived", store.add("arrived", 0))
dist.destroy_process_group()
