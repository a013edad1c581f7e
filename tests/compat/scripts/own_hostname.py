"""MASTER_ADDR is set to the machine's own name, MASTER_PORT is left: scripts for one node on GitHub, `socket.gethostname()`."""

import os
import socket

import torch.distributed as dist

os.environ["MASTER_ADDR"] = socket.gethostname()
dist.init_process_group("gloo")
dist.barrier()
print("rank", dist.get_rank(), "of", dist.get_world_size())
dist.destroy_process_group()
