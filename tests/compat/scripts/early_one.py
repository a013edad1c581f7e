"""One rank leaves with sys.exit(1) while the others are in a collective: a missing file that one rank alone looks for."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    print("checkpoint not found", file=sys.stderr)
    sys.exit(1)
dist.all_reduce(torch.ones(1))
