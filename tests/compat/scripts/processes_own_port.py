"""multiprocessing.Process for each rank, env:// with a port of its own: pytorch/tutorials, intermediate_source/dist_tuto.rst."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, size):
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        dist.send(tensor=tensor, dst=1)
    else:
        dist.recv(tensor=tensor, src=0)
    open(f"child{rank}.txt", "w").write(f"rank {rank} has data {tensor[0].item()}\n")


def init_process(rank, size, fn, backend="gloo"):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = sys.argv[1]
    dist.init_process_group(backend, rank=rank, world_size=size)
    fn(rank, size)


if __name__ == "__main__":
    mp.set_start_method("spawn")
    processes = [mp.Process(target=init_process, args=(rank, 2, run)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print([process.exitcode for process in processes])
