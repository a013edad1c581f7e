"""Keep a GPU busy, and 2 GiB of its memory, until the file `stop` exists."""

from pathlib import Path

import torch

from clusterjob import bootstrap

with bootstrap.init() as ctx:
    held = torch.ones(2 << 30, dtype=torch.uint8, device=ctx.device)
    left = torch.randn(4096, 4096, device=ctx.device)
    print("busy", flush=True)
    while not Path("stop").exists():
        for _ in range(50):
            torch.mm(left, left)
        if ctx.device.type == "cuda":
            torch.cuda.synchronize()
    assert held[-1] == 1
    print("stopped", flush=True)
