"""No seed at all: ranks must not draw the same numbers from python's and numpy's generators."""

import random

import numpy as np
import torch.distributed as dist

dist.init_process_group("gloo")
drawn = [None] * dist.get_world_size()
dist.all_gather_object(drawn, (random.random(), np.random.rand()))
print("python differs", len({pair[0] for pair in drawn}) == len(drawn), "numpy differs", len({pair[1] for pair in drawn}) == len(drawn))
dist.destroy_process_group()
