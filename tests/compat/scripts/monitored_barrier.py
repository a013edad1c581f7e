"""monitored_barrier names the rank that is late: the documentation of torch.distributed, "Monitored Barrier"."""

import time
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    time.sleep(60)
dist.monitored_barrier(timeout=timedelta(seconds=2))
