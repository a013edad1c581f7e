"""Fit a straight line on several processes with torch alone, under any launcher.

    torchrun --nproc-per-node 2 examples/plain_env.py
    clusterjob launch --nproc-per-node 2 examples/plain_env.py

The script needs MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, and LOCAL_RANK to choose a GPU.
"""

import os

import torch
import torch.distributed as dist

SLOPE, INTERCEPT = 3.0, -1.0


def main() -> None:
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", init_method="env://", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", init_method="env://")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    rank_sum = torch.tensor([rank + 1.0], device=device)
    dist.all_reduce(rank_sum)  # 1 + 2 + ... + world_size if all ranks have joined

    # Each process has its own points; the averaged gradient uses the points of all processes.
    generator = torch.Generator().manual_seed(rank)
    x = torch.rand(256, generator=generator).to(device)
    y = SLOPE * x + INTERCEPT + 0.01 * torch.randn(256, generator=generator).to(device)
    weights = torch.zeros(2, device=device, requires_grad=True)
    for _ in range(200):
        loss = ((weights[0] * x + weights[1] - y) ** 2).mean()
        (gradient,) = torch.autograd.grad(loss, weights)
        dist.all_reduce(gradient)  # DistributedDataParallel does this for a whole model
        with torch.no_grad():
            weights -= 0.5 * gradient / world_size

    if rank == 0:
        slope, intercept = weights.tolist()
        print(f"all-reduce over {world_size} ranks: {rank_sum.item():g}", flush=True)
        print(
            f"fitted y = {slope:.3f} x + {intercept:.3f}, true y = {SLOPE:g} x + {INTERCEPT:g}",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
