"""The place from the environment, or processes of its own: facebookresearch/fairseq, distributed/utils.py infer_init_method and call_main."""

import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def infer_init_method(cfg):
    if all(key in os.environ for key in ["MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"]):
        cfg.init_method = "env://"
        cfg.world_size = int(os.environ["WORLD_SIZE"])
        cfg.rank = int(os.environ["RANK"])
        cfg.no_spawn = True


def distributed_main(index, main, cfg):
    dist.init_process_group("gloo", init_method=cfg.init_method, world_size=cfg.world_size, rank=cfg.rank)
    dist.all_reduce(torch.zeros(1))
    main(cfg)
    dist.barrier()


def main(cfg):
    print(f"| distributed init (rank {cfg.rank}): {cfg.init_method}")


if __name__ == "__main__":
    cfg = SimpleNamespace(init_method=None, world_size=1, rank=0, no_spawn=False)
    infer_init_method(cfg)
    if cfg.no_spawn:
        distributed_main(0, main, cfg)
    else:
        mp.spawn(distributed_main, args=(main, cfg), nprocs=2)
