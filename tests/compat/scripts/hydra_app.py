"""@hydra.main around DDP, its own working directory for each run: pytorch/examples, distributed/minGPT-ddp/mingpt/main.py."""

import os

import hydra
import torch.distributed as dist
from omegaconf import DictConfig


@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(cfg: DictConfig):
    dist.init_process_group("gloo")
    print("rank", os.environ["RANK"], "lr", cfg.optimizer.lr, "epochs", cfg.epochs)
    dist.barrier()
    if dist.get_rank() == 0:
        with open("trained.txt", "w") as stream:
            stream.write(f"{cfg.optimizer.lr}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
