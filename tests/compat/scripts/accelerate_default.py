"""Accelerator() without cpu=True, as for GPUs: huggingface/accelerate, examples/complete_nlp_example.py."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator()
    dataset = TensorDataset(torch.arange(16.0).reshape(16, 1))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(dataset, batch_size=4))
    seen = 0
    for (source,) in loader:
        accelerator.backward(model(source).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        seen += len(accelerator.gather_for_metrics(source))
    accelerator.print(f"seen {seen} on {accelerator.num_processes} processes")
    accelerator.end_training()


if __name__ == "__main__":
    main()
