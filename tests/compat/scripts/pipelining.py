"""Two pipeline stages, GPipe schedule: torch.distributed.pipelining, pytorch/tutorials, intermediate_source/pipelining_tutorial.rst."""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
stage = PipelineStage(torch.nn.Linear(4, 4), rank, world, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)
if rank == 0:
    schedule.step(torch.ones(4, 4))
else:
    losses = []
    schedule.step(target=torch.zeros(4, 4), losses=losses)
    print("losses", len(losses))
print("rank", rank, "done")
dist.destroy_process_group()
