"""No destroy_process_group at all: pytorch/tutorials, the elastic_ddp.py of the DDP tutorial."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def demo_basic():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print(f"start running basic DDP example on rank {rank}.")
    model = DDP(nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loss = nn.MSELoss()(model(torch.randn(20, 10)), torch.randn(20, 5))
    loss.backward()
    optimizer.step()


if __name__ == "__main__":
    demo_basic()
