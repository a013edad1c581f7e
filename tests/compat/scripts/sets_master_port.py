"""Each rank overwrites MASTER_ADDR and MASTER_PORT, then env://: many training scripts on GitHub, `os.environ["MASTER_PORT"] = "29500"`."""

import os
import sys

import torch.distributed as dist

os.environ["MASTER_ADDR"] = "127.0.0.1"
os.environ["MASTER_PORT"] = sys.argv[1]
dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
dist.barrier()
print("rank", dist.get_rank(), "of", dist.get_world_size())
dist.destroy_process_group()
