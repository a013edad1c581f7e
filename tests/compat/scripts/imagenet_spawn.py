"""--multiprocessing-distributed: one process of the launcher spawns all ranks: pytorch/examples, imagenet/main.py."""

import argparse

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

parser = argparse.ArgumentParser()
parser.add_argument("--world-size", default=1, type=int)
parser.add_argument("--rank", default=0, type=int)
parser.add_argument("--dist-url", default="tcp://224.66.41.62:23456")
parser.add_argument("--dist-backend", default="gloo")
parser.add_argument("--multiprocessing-distributed", action="store_true")


def main_worker(gpu, ngpus_per_node, args):
    args.gpu = gpu
    if args.multiprocessing_distributed:
        args.rank = args.rank * ngpus_per_node + gpu
    dist.init_process_group(args.dist_backend, init_method=args.dist_url, world_size=args.world_size, rank=args.rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    model(torch.randn(3, 4)).sum().backward()
    if args.rank % ngpus_per_node == 0:
        torch.save({"epoch": 1, "state_dict": model.state_dict()}, "checkpoint.pth.tar")


def main():
    args = parser.parse_args()
    ngpus_per_node = 2
    if args.multiprocessing_distributed:
        args.world_size = ngpus_per_node * args.world_size
        mp.spawn(main_worker, nprocs=ngpus_per_node, args=(ngpus_per_node, args))
    else:
        main_worker(0, 1, args)
    print("trained")


if __name__ == "__main__":
    main()
