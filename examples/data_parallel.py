"""Train in one process on all visible GPUs with torch.nn.DataParallel.

    python examples/data_parallel.py
    CUDA_VISIBLE_DEVICES=4,5 python examples/data_parallel.py

Each step splits the batch among the GPUs and copies the model to each of them. This needs no
launcher and no process group, but one Python process serves all GPUs: DistributedDataParallel
(train_recipes.py) is faster. Without a GPU the model runs on the CPU.
"""

import torch
from torch import nn

from clusterjob import bootstrap


def main() -> None:
    torch.manual_seed(0)
    with bootstrap.init(process_group=False) as ctx:  # a device without a process group
        inputs = torch.randn(1024, 16)
        labels = (inputs @ torch.randn(16, 4)).argmax(dim=1)
        model = nn.DataParallel(
            nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).to(ctx.device)
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for epoch in range(20):
            order = torch.randperm(len(inputs))
            for chosen in order.split(128):
                loss = nn.functional.cross_entropy(
                    model(inputs[chosen].to(ctx.device)), labels[chosen].to(ctx.device)
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if (epoch + 1) % 5 == 0:
                print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)
        with torch.no_grad():
            correct = (model(inputs.to(ctx.device)).argmax(dim=1).cpu() == labels).sum().item()
        print(
            f"accuracy {correct / len(inputs):.4f} "
            f"on {max(1, len(model.device_ids))} x {ctx.device.type}"
        )


if __name__ == "__main__":
    main()
