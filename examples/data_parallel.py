"""Train in one process on all GPUs that it sees, by torch.nn.DataParallel. On the CPU the module
runs as it is.

    python examples/data_parallel.py CUDA_VISIBLE_DEVICES=4,5 python examples/data_parallel.py

The batch is split among the GPUs in every step, and the model copied to each: no launcher and no
process group, at the price of one Python for all GPUs. DistributedDataParallel (train_recipes.py)
is faster.
"""

import torch
from torch import nn

from clusterjob import bootstrap


def main() -> None:
    torch.manual_seed(0)
    with bootstrap.init(process_group=False) as ctx:  # a device, and no group
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
            right = (model(inputs.to(ctx.device)).argmax(dim=1).cpu() == labels).sum().item()
        print(
            f"accuracy {right / len(inputs):.4f} on {max(1, len(model.device_ids))} x {ctx.device.type}"
        )


if __name__ == "__main__":
    main()
