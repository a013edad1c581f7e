"""Fit a line in several processes that `clusterjob.spawn` starts, without a launcher.

python examples/spawn_function.py             # one process per GPU, or one without a GPU
python examples/spawn_function.py 2           # two processes
python examples/spawn_function.py 2 4,5       # two processes, on the GPUs 4 and 5
"""

import sys

import torch
from torch import nn

import clusterjob
from clusterjob import bootstrap


def train(verbose) -> float:
    with bootstrap.init() as ctx:
        torch.manual_seed(ctx.rank)
        inputs = torch.rand(256, 1, device=ctx.device)
        targets = 3 * inputs - 1
        model = ctx.wrap(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(200):
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if verbose:
            print(f"rank {ctx.rank} of {ctx.world_size} on {ctx.device}")
        return ctx.reduce(loss.item())


if __name__ == "__main__":
    nprocs = int(sys.argv[1]) if len(sys.argv) > 1 else None
    gpus = sys.argv[2] if len(sys.argv) > 2 else None
    losses = clusterjob.spawn(train, args=(True,), nprocs=nprocs, gpus=gpus)
    print(f"loss {losses[0]:.6f} after training on {len(losses)} processes")
