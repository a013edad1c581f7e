"""Normalise with SyncBatchNorm: its statistics are those of the samples of all ranks."""

import torch
from torch import nn

from clusterjob import bootstrap

with bootstrap.init() as ctx:
    plain = nn.BatchNorm1d(8)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(8)))
    model = ctx.wrap(model)
    data = [
        torch.randn(64, 8, generator=torch.Generator().manual_seed(rank)) * (rank + 1) + rank
        for rank in range(ctx.world_size)
    ]
    wanted = plain(torch.cat(data))[64 * ctx.rank : 64 * (ctx.rank + 1)]
    given = data[ctx.rank].to(ctx.device).requires_grad_()
    output = model(given)
    torch.testing.assert_close(output.cpu(), wanted, rtol=1e-4, atol=1e-5)
    output.square().sum().backward()
    assert given.grad is not None
    assert torch.isfinite(given.grad).all()
    layer = model.module[0] if hasattr(model, "module") else model[0]
    torch.testing.assert_close(layer.running_mean.cpu(), plain.running_mean, rtol=1e-4, atol=1e-5)
    print(f"rank {ctx.rank} of {ctx.world_size}: {type(layer).__name__} agrees")
