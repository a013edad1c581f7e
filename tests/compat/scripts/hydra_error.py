"""Hydra prints the traceback itself and ends with sys.exit(1): ashleve/lightning-hydra-template, any of its runs that fails."""

import os

import hydra
from omegaconf import DictConfig


@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(cfg: DictConfig):
    if os.environ["RANK"] == "1":
        raise ValueError(f"no dataset for lr {cfg.optimizer.lr}")


if __name__ == "__main__":
    main()
