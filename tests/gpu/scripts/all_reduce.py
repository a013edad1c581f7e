"""Sum a tensor of each rank through bootstrap, and print who this rank is."""

import sys

START = "fork" if "torch" in sys.modules else "exec"  # before torch is imported here

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from clusterjob import bootstrap  # noqa: E402

with bootstrap.init() as ctx:
    value = torch.full((1024,), ctx.rank + 1.0, device=ctx.device)
    dist.all_reduce(value)
    wanted = ctx.world_size * (ctx.world_size + 1) / 2
    assert torch.equal(value, torch.full_like(value, wanted)), value[0]
    print(
        f"rank {ctx.rank} of {ctx.world_size}: {dist.get_backend()} on {ctx.device},"
        f" current {torch.cuda.current_device() if torch.cuda.is_available() else 'cpu'},"
        f" {START}",
        flush=True,
    )
