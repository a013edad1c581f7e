"""init_method="tcp://127.0.0.1:PORT": pytorch/examples, imagenet/main.py --dist-url."""

import os
import sys

import torch.distributed as dist

dist.init_process_group(
    backend="gloo",
    init_method=f"tcp://127.0.0.1:{sys.argv[1]}",
    world_size=int(os.environ["WORLD_SIZE"]),
    rank=int(os.environ["RANK"]),
)
dist.barrier()
print("rank", dist.get_rank(), "of", dist.get_world_size())
dist.destroy_process_group()
