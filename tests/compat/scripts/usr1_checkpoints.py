"""SIGUSR1 writes a checkpoint and training goes on: Lightning's and submitit's handlers for Slurm, `#SBATCH --signal=USR1@60`."""

import os
import signal

import torch
import torch.distributed as dist

wanted = False


def handler(number, frame):
    global wanted
    wanted = True


signal.signal(signal.SIGUSR1, handler)
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(3):
    if step == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    dist.all_reduce(torch.ones(1))
    if wanted:
        wanted = False
        with open(f"step{step}-rank{rank}.txt", "w") as stream:
            stream.write("checkpoint\n")
print("finished")
dist.destroy_process_group()
