"""Train in mixed precision with GradScaler; a step with an infinite gradient is skipped."""

import torch
from torch import nn

from clusterjob import bootstrap

with bootstrap.init() as ctx:
    kind = ctx.device.type
    torch.manual_seed(ctx.rank)
    model = ctx.wrap(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(kind, init_scale=2.0**10, growth_interval=10)
    losses = []
    for step in range(200):
        data = torch.randn(256, 64, device=ctx.device)
        with torch.autocast(kind, torch.float16 if kind == "cuda" else torch.bfloat16):
            output = model(data)
        loss = (output.float() - data.mean(1, keepdim=True)).square().mean()
        if step == 150:  # all ranks see the infinite gradient, because it is reduced
            loss = loss * (float("inf") if ctx.rank == 0 else 1.0)
        before = [each.detach().clone() for each in model.parameters()]
        scale = scaler.get_scale()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 150:
            assert scaler.get_scale() == scale / 2, (scale, scaler.get_scale())
            after = list(model.parameters())
            assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
        else:
            losses.append(loss.item())
    assert all(value == value for value in losses)
    assert losses[-1] < losses[0] / 2, (losses[0], losses[-1])
    assert scaler.get_scale() > 2.0**10
    print(f"rank {ctx.rank} of {ctx.world_size}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
