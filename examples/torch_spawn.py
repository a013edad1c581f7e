"""Fit a line in processes that the script starts itself with multiprocessing.

    python examples/torch_spawn.py                    # torch.multiprocessing.spawn, two processes
    python examples/torch_spawn.py --plain            # multiprocessing.Process
    python examples/torch_spawn.py --nprocs 8

Each process passes its rank and the world size to bootstrap.init. On one machine, bootstrap finds
a free port.
"""

import argparse
import multiprocessing

import torch
from torch import nn

from clusterjob import bootstrap


def train(rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    with bootstrap.init(rank=rank, world_size=world_size) as ctx:
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
        total = ctx.reduce(len(inputs), "sum")
        ctx.print(
            f"loss {ctx.reduce(loss.item()):.6f} over {total} points of {ctx.world_size} processes"
        )


def start_with_multiprocessing(world_size: int) -> None:
    # "spawn" starts new interpreters: a forked process cannot use CUDA if its parent has used it.
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=train, args=(rank, world_size)) for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    failed = [rank for rank, process in enumerate(processes) if process.exitcode]
    if failed:
        raise SystemExit(f"failed: rank {failed}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nprocs", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument(
        "--plain",
        action="store_true",
        help="multiprocessing.Process in the place of torch.multiprocessing.spawn",
    )
    options = parser.parse_args()
    if options.plain:
        start_with_multiprocessing(options.nprocs)
    else:
        torch.multiprocessing.spawn(train, args=(options.nprocs,), nprocs=options.nprocs)


if __name__ == "__main__":
    main()
