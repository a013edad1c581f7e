"""parallelize_module with DTensor: pytorch/examples, distributed/tensor_parallelism/tensor_parallel_example.py."""

import os

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
model(torch.ones(2, 8)).sum().backward()
big = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
print("rank", mesh.get_rank(), "local", big.to_local().tolist(), "whole", big.full_tensor().sum().item())
torch.distributed.destroy_process_group()
