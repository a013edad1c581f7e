"""A plain env:// script: all ranks run one all-reduce; rank 0 writes its end time to FILE.

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
