"""SummaryWriter on rank 0, its thread and its files: pytorch/examples and HF Trainer's callbacks."""

import os

import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    writer = SummaryWriter("runs")
    writer.add_scalar("loss", 0.5, 1)
    writer.close()
    names = os.listdir("runs")
    print("files", len(names))
    os.remove(os.path.join("runs", names[0]))
dist.barrier()
dist.destroy_process_group()
