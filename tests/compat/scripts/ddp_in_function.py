"""DDP inside main(), the group destroyed before the model is freed: pytorch/examples, distributed/ddp-tutorial-series/multigpu_torchrun.py."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, model, data, optimizer):
        self.rank = int(os.environ["RANK"])
        self.model = DistributedDataParallel(model)
        self.data = data
        self.optimizer = optimizer

    def train(self, epochs):
        for epoch in range(epochs):
            self.data.sampler.set_epoch(epoch)
            for source, targets in self.data:
                self.optimizer.zero_grad()
                nn.functional.mse_loss(self.model(source), targets).backward()
                self.optimizer.step()
            print(f"[{self.rank}] epoch {epoch} | steps {len(self.data)}")
            if self.rank == 0:
                torch.save({"model": self.model.module.state_dict(), "epoch": epoch}, "snapshot.pt")


def main():
    dist.init_process_group(backend="gloo")
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    trainer = Trainer(model, DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset)), optimizer)
    trainer.train(2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
