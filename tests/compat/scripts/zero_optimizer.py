"""ZeroRedundancyOptimizer: pytorch/tutorials, recipes_source/zero_redundancy_optimizer.rst."""

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def example():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)]))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    model(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    print(f"params sum is: {sum(p.sum() for p in model.parameters()).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    example()
