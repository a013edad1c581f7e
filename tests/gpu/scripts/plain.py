"""Train with DistributedDataParallel as in torch's tutorials, without clusterjob."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

cuda = torch.cuda.is_available()
local_rank = int(os.environ["LOCAL_RANK"])
if cuda:
    torch.cuda.set_device(local_rank)
dist.init_process_group("nccl" if cuda else "gloo")
device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(
    nn.Linear(32, 1).to(device), device_ids=[local_rank] if cuda else None
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = last = 0.0
for _ in range(50):
    data = torch.randn(256, 32, device=device)
    loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    first, last = first or loss.item(), loss.item()
weights = [torch.empty_like(model.module.weight) for _ in range(dist.get_world_size())]
dist.all_gather(weights, model.module.weight.detach())
assert all(torch.equal(each, weights[0]) for each in weights)
assert last < first / 10, (first, last)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {dist.get_backend()} on {device}")
dist.destroy_process_group()
