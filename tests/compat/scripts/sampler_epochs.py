"""DistributedSampler with set_epoch, seeds set for all, workers' seeds by rank: pytorch/vision, references/classification/train.py."""

import random

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
seed = 7 + dist.get_rank()
random.seed(seed)
np.random.seed(seed)
torch.manual_seed(seed)
data = TensorDataset(torch.arange(10))
sampler = DistributedSampler(data, shuffle=True, seed=3)
for epoch in range(2):
    sampler.set_epoch(epoch)
    print(epoch, [batch[0].tolist() for batch in DataLoader(data, batch_size=2, sampler=sampler)])
print(random.randrange(1000), np.random.randint(1000), torch.randint(1000, ()).item())
dist.destroy_process_group()
