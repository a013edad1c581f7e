"""One rank ends with os._exit(7): watchdogs such as Megatron-LM's fault tolerance exits."""

import os
import time

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    os._exit(7)
time.sleep(60)
