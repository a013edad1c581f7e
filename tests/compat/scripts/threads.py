"""torch.get_num_threads: torchrun sets OMP_NUM_THREADS=1 where nobody has set it."""

import os

import torch

print("threads", torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"]))
