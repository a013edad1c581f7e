"""A plain env:// script: joins, adds up one number over all ranks, and rank 0 writes down when that
was done.

Use: first_all_reduce.py FILE
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 0:
    done = time.monotonic()
    assert total.item() == dist.get_world_size()
    Path(sys.argv[1]).write_text(repr(done))
dist.destroy_process_group()
