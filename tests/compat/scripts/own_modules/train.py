"""Modules beside the script have names of Python's own, which a launcher may have loaded."""

import profile
import secrets
import statistics

import torch.distributed as dist

dist.init_process_group("gloo")
print(secrets.OWN, statistics.OWN, profile.OWN)
dist.destroy_process_group()
