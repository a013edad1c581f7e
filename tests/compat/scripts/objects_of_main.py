"""Pickled classes of __main__, a spawned process that imports it again, source by inspect: datasets.map, torch.save of whole models."""

import inspect
import multiprocessing
import os
import sys

import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, value):
        return self.layer(value)


def work(net):
    return type(net).__module__


if __name__ == "__main__":
    path = f"net{os.environ['RANK']}.pt"
    torch.save(Net(), path)
    net = torch.load(path, weights_only=False)
    print(type(net) is Net, len(inspect.getsource(Net).splitlines()), torch.jit.script(net)(torch.zeros(1, 2)).shape)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(work, (net,)), sys.modules["__main__"].__file__ == __file__)
