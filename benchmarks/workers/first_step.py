"""A plain env:// training script: rank 0 writes the time of its first step to FILE.

Use: first_step.py FILE
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(4, 8)).sum().backward()
optimizer.step()
if dist.get_rank() == 0:
    Path(sys.argv[1]).write_text(repr(time.monotonic()))
dist.destroy_process_group()
