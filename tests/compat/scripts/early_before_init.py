"""One rank raises before init_process_group, the others wait in it: a bad path in one rank's arguments."""

import os

import torch.distributed as dist

if os.environ["RANK"] == "1":
    raise FileNotFoundError("data/train.bin")
dist.init_process_group("gloo")
