"""dcp.async_save, awaited before the end: pytorch/tutorials, recipes_source/distributed_async_checkpoint_recipe.rst."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

dist.init_process_group("cpu:gloo")
future = dcp.async_save({"weight": torch.ones(4), "step": 3}, checkpoint_id="checkpoint")
print("goes on")
future.result()
dist.destroy_process_group()
