"""init_method="file:///...": pytorch/examples, distributed/ddp/example.py; overfitover/pytorch-distributed, init_examples/file_init.py."""

import os

import torch.distributed as dist

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/shared_file", rank=rank, world_size=world)
dist.barrier()
print("rank", dist.get_rank(), "of", dist.get_world_size())
dist.destroy_process_group()
