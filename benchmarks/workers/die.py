"""The last rank writes the time to FILE and dies while the other ranks wait in a collective.

Use: die.py raise|exit|SIGKILL|SIGSEGV all_reduce|barrier FILE
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

how, collective, file = sys.argv[1:]
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == dist.get_world_size() - 1:
    time.sleep(0.5)  # by now the others wait in the collective below
    Path(file).write_text(repr(time.monotonic()))
    if how == "raise":
        raise ValueError("one rank is broken")
    if how == "exit":
        sys.exit(3)
    os.kill(os.getpid(), signal.Signals[how])
if collective == "barrier":
    dist.barrier()
else:
    dist.all_reduce(torch.ones(1))
