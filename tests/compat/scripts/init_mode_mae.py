"""init_distributed_mode with three ways in, prints with a stamp: facebookresearch/mae, util/misc.py."""

import argparse
import builtins
import os

import torch.distributed as dist


def setup_for_distributed(is_master):
    builtin_print = builtins.print

    def print(*args, **kwargs):
        force = kwargs.pop("force", False)
        if is_master or force:
            builtin_print("[stamp] ", end="")
            builtin_print(*args, **kwargs)

    builtins.print = print


def init_distributed_mode(args):
    if args.dist_on_itp:
        args.rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        args.world_size = int(os.environ["OMPI_COMM_WORLD_SIZE"])
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        args.rank = int(os.environ["RANK"])
        args.world_size = int(os.environ["WORLD_SIZE"])
        args.gpu = int(os.environ["LOCAL_RANK"])
    else:
        setup_for_distributed(is_master=True)
        args.distributed = False
        return
    args.distributed = True
    print(f"| distributed init (rank {args.rank}): {args.dist_url}, gpu {args.gpu}", flush=True)
    dist.init_process_group(backend="gloo", init_method=args.dist_url, world_size=args.world_size, rank=args.rank)
    dist.barrier()
    setup_for_distributed(args.rank == 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser("MAE pre-training")
    parser.add_argument("--world_size", default=1, type=int)
    parser.add_argument("--local_rank", default=-1, type=int)
    parser.add_argument("--dist_on_itp", action="store_true")
    parser.add_argument("--dist_url", default="env://")
    args = parser.parse_args()
    init_distributed_mode(args)
    print("Start training for", args.world_size, "processes")
    print("forced", force=True)
