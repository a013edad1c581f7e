"""--local_rank by argparse with the variable as its default: microsoft/DeepSpeedExamples, training/cifar; torch.distributed.launch scripts."""

import argparse
import os

import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", "--local-rank", type=int, default=-1)
parser.add_argument("--deepspeed_config", default=None)
args = parser.parse_args()
if args.local_rank == -1:
    args.local_rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("gloo")
dist.barrier()
print("local rank", args.local_rank, "config", args.deepspeed_config)
dist.destroy_process_group()
