"""Shared memory and processes, no group at all: pytorch/examples, mnist_hogwild/main.py."""

import torch
import torch.multiprocessing as mp


def train(rank, model):
    torch.manual_seed(rank)
    with torch.no_grad():
        model.weight += 1


if __name__ == "__main__":
    mp.set_start_method("spawn", force=True)
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model.share_memory()
    processes = [mp.Process(target=train, args=(rank, model)) for rank in range(2)]
    for process in processes:
        process.start()
        process.join()
    print("weight", model.weight.tolist())
