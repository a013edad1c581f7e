"""Accelerator, prepare, gather_for_metrics, end_training: huggingface/accelerate, examples/nlp_example.py."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def training_function():
    accelerator = Accelerator(cpu=True)
    set_seed(42)
    dataset = TensorDataset(torch.arange(32.0).reshape(16, 2), torch.arange(16.0).reshape(16, 1))
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(dataset, batch_size=4))
    seen = 0
    for source, target in loader:
        accelerator.backward(torch.nn.functional.mse_loss(model(source), target))
        optimizer.step()
        optimizer.zero_grad()
        seen += len(accelerator.gather_for_metrics(target))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
    accelerator.print(f"seen {seen} on {accelerator.num_processes} processes")
    accelerator.end_training()


if __name__ == "__main__":
    training_function()
