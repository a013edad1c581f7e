"""An exception in a process of a DataLoader: the classic "Caught ValueError in DataLoader worker process 0"."""

import os

import torch
from torch.utils.data import DataLoader, Dataset


class Broken(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if os.environ["RANK"] == "1" and index == 2:
            raise ValueError("image file is truncated")
        return torch.zeros(1)


for _ in DataLoader(Broken(), num_workers=1):
    pass
