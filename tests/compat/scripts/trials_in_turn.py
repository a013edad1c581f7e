"""Trials of a sweep in turn: rank 0 in the parent, new children for the other ranks: docs.pytorch.org/tutorials, intermediate/dist_tuto."""

import argparse

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--context", default="fork")
parser.add_argument("--world-sizes", default=[2, 2, 2], type=int, nargs="+")


def trial(rank, world_size, lr):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.full((1, 2), float(rank))).sum().backward()
        optimizer.step()
    total = torch.ones(1)
    dist.all_reduce(total)
    if rank == 0:
        print(f"lr {lr:.1f}: {int(total.item())} ranks, bias {model.module.bias.item():.4f}")
    dist.destroy_process_group()


def main():
    args = parser.parse_args()
    context = mp.get_context(args.context)
    for number, world_size in enumerate(args.world_sizes):
        arguments = (world_size, 0.1 * (number + 1))
        children = [context.Process(target=trial, args=(rank, *arguments)) for rank in range(1, world_size)]
        for child in children:
            child.start()
        trial(0, *arguments)
        for child in children:
            child.join()
        print("children:", [child.exitcode for child in children])


if __name__ == "__main__":
    main()
