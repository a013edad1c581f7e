"""One rank fails inside init_process_group, the others wait in it: a backend that one node lacks."""

import os

import torch.distributed as dist

dist.init_process_group("gloo" if os.environ["RANK"] == "0" else "nosuchbackend")
