"""Fabric.launch and setup around a plain loop: Lightning-AI/pytorch-lightning, examples/fabric."""

import os

import torch
from lightning.fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp")
fabric.launch()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
fabric.backward(model(torch.ones(2, 4)).sum())
optimizer.step()
print("rank", fabric.global_rank, "sum", fabric.all_reduce(torch.tensor(float(fabric.global_rank)), reduce_op="sum").item())
fabric.save("state.ckpt", {"model": model})
