"""init_distributed_mode with rank and world size from the environment: facebookresearch/dino, utils.py."""

import argparse
import os
import sys

import torch
import torch.distributed as dist


def setup_for_distributed(is_master):
    import builtins

    builtin_print = builtins.print

    def print(*args, **kwargs):
        if is_master or kwargs.pop("force", False):
            builtin_print(*args, **kwargs)

    builtins.print = print


def init_distributed_mode(args):
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        args.rank = int(os.environ["RANK"])
        args.world_size = int(os.environ["WORLD_SIZE"])
        args.gpu = int(os.environ["LOCAL_RANK"])
    elif "SLURM_PROCID" in os.environ:
        args.rank = int(os.environ["SLURM_PROCID"])
        args.gpu = args.rank % torch.cuda.device_count()
    else:
        print("Does not support training without GPU.")
        sys.exit(1)
    dist.init_process_group(backend="gloo", init_method=args.dist_url, world_size=args.world_size, rank=args.rank)
    print(f"| distributed init (rank {args.rank}): {args.dist_url}", flush=True)
    dist.barrier()
    setup_for_distributed(args.rank == 0)


parser = argparse.ArgumentParser("DINO")
parser.add_argument("--dist_url", default="env://")
parser.add_argument("--local_rank", default=0, type=int, help="please ignore and do not set this argument")
parser.add_argument("--output_dir", default="out")
args = parser.parse_args()
os.makedirs(args.output_dir, exist_ok=True)
init_distributed_mode(args)
print("git: N/A", f"world {args.world_size}")
