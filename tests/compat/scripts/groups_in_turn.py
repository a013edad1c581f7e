"""Process groups made and destroyed one after another: pytorch/pytorch, its own distributed tests and elastic trainers."""

import torch
import torch.distributed as dist


def once(number):
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    value = torch.tensor([float(dist.get_rank() + number)])
    dist.all_reduce(value)
    print(f"round {number}: {value.item()}")
    dist.barrier()
    dist.destroy_process_group()


for number in range(3):
    once(number)
