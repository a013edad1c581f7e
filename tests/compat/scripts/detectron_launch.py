"""launch(): a free port, start_processes, tcp://: facebookresearch/detectron2, engine/launch.py."""

import socket
from datetime import timedelta

import torch.distributed as dist
import torch.multiprocessing as mp


def find_free_port():
    with socket.socket() as sock:
        sock.bind(("", 0))
        return sock.getsockname()[1]


def worker(local_rank, main_func, world_size, dist_url, args):
    dist.init_process_group("GLOO", init_method=dist_url, world_size=world_size, rank=local_rank, timeout=timedelta(minutes=1))
    local = [dist.new_group([rank]) for rank in range(world_size)]
    dist.barrier()
    main_func(local[local_rank], *args)


def train(group, name):
    open(f"{name}{dist.get_rank()}.txt", "w").write(f"{dist.get_world_size()} {dist.get_world_size(group)}\n")


def launch(main_func, nproc, args=()):
    url = f"tcp://127.0.0.1:{find_free_port()}"
    mp.start_processes(worker, nprocs=nproc, args=(main_func, nproc, url, args), daemon=False)


if __name__ == "__main__":
    launch(train, 2, ("log",))
    print("done")
