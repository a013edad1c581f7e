"""init_distributed_mode, save_on_master, meters synchronised over the ranks: pytorch/vision, references/classification/utils.py."""

import os
from types import SimpleNamespace

import torch
import torch.distributed as dist


def is_main_process():
    return not dist.is_initialized() or dist.get_rank() == 0


def save_on_master(*args, **kwargs):
    if is_main_process():
        torch.save(*args, **kwargs)


def init_distributed_mode(args):
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        args.rank = int(os.environ["RANK"])
        args.world_size = int(os.environ["WORLD_SIZE"])
        args.gpu = int(os.environ["LOCAL_RANK"])
    else:
        args.distributed = False
        return
    args.distributed = True
    torch.distributed.init_process_group(backend="gloo", init_method="env://", world_size=args.world_size, rank=args.rank)
    torch.distributed.barrier()


def reduce_across_processes(value):
    tensor = torch.tensor(value)
    dist.barrier()
    dist.all_reduce(tensor)
    return tensor


args = SimpleNamespace()
init_distributed_mode(args)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
model_without_ddp = model.module
total = reduce_across_processes([1.0, float(args.rank)])
save_on_master({"model": model_without_ddp.state_dict(), "args": vars(args)}, "model_0.pth")
if is_main_process():
    print("count and total", total.tolist())
