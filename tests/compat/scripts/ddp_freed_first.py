"""The DDP model is deleted before the group is destroyed: huggingface/accelerate, Accelerator.free_memory in its examples."""

import gc

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
model(torch.ones(2, 4)).sum().backward()
print("gradient", model.module.weight.grad.tolist())
del model
gc.collect()
dist.destroy_process_group()
print("destroyed")
