"""Train a small classifier that saves a checkpoint on preemption and resumes from it.

    clusterjob launch --nproc-per-node 2 --warning 60 examples/train_resume.py --checkpoint saved
    kill -USR1 AGENT     # a scheduler does this before it preempts a job, which exits with code 75
    CLUSTERJOB_ATTEMPT=1 clusterjob launch --nproc-per-node 2 --warning 60 \\
      examples/train_resume.py --checkpoint saved

The final weights are bit for bit those of an uninterrupted run, after any number of interruptions
and even after a kill without a warning. For this, a checkpoint contains everything that a step
depends on: model, optimizer, step number and random number state. The batch of a step depends only
on the step number.
"""

import argparse
import hashlib
from pathlib import Path

import torch
from torch import nn

from clusterjob import bootstrap


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Return (inputs, labels) of a synthetic task with four classes, equal on all processes."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4096, 16, generator=generator)
    return inputs, (inputs @ torch.randn(16, 4, generator=generator)).argmax(dim=1)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))


def batch(ctx, labels: torch.Tensor, step: int, size: int) -> torch.Tensor:
    """Return the indices of this process's samples in one step; they depend on the step only."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(step))
    return order[ctx.rank * size : (ctx.rank + 1) * size]


def save(ctx, saved, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Save a checkpoint; all processes must call this function."""
    # Each process has its own random number state, for dropout.
    states = torch.zeros(ctx.world_size, len(torch.get_rng_state()), dtype=torch.uint8)
    states[ctx.rank] = torch.get_rng_state()
    states = ctx.reduce(states, "sum").to(torch.uint8)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": states}
    saved.save(state, step=step)


def resume(ctx, saved, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the latest checkpoint if there is one; return the first step to run."""
    state = saved.load()
    if state is None:
        return 0
    if len(state["random"]) != ctx.world_size:
        raise SystemExit(
            f"the checkpoint is of {len(state['random'])} processes, and here are {ctx.world_size}"
        )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    # torch 2.13 reads the wrong bytes of a view; clone() copies it.
    torch.set_rng_state(state["random"][ctx.rank].clone())
    return saved.step


def digest(model: nn.Module) -> str:
    """Return a hash of all bits of the weights."""
    tensors = sorted(model.state_dict().items())
    return hashlib.sha256(
        b"".join(tensor.cpu().numpy().tobytes() for _, tensor in tensors)
    ).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="shared by all nodes"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument(
        "--batch-size",
        type=int,
        default=32,
        help="samples per step and process (default %(default)s)",
    )
    options = parser.parse_args()

    torch.set_num_threads(1)
    with bootstrap.init() as ctx:
        torch.manual_seed(ctx.rank)
        inputs, labels = samples()
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        # DDP copies rank 0's weights to all processes. After its first step it regroups the
        # gradients, which changes the order of the sums: the first step after a resume would differ
        # in the last bit. find_unused_parameters prevents the regrouping.
        wrapped = ctx.wrap(model, find_unused_parameters=True)

        saved = ctx.checkpoint(options.checkpoint)
        first = resume(ctx, saved, model, optimizer)
        ctx.print(f"attempt {ctx.attempt}: from step {first}")
        for step in range(first, options.steps):
            chosen = batch(ctx, labels, step, options.batch_size)
            loss = nn.functional.cross_entropy(
                wrapped(inputs[chosen].to(ctx.device)), labels[chosen].to(ctx.device)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            # The warning may reach the processes at different steps; because of the reduction they
            # all leave at the same step.
            leaving = bool(ctx.reduce(ctx.preempted, "max")) and step + 1 < options.steps
            if leaving or (step + 1) % options.save_every == 0:
                save(ctx, saved, model, optimizer, step + 1)
                ctx.print(f"step {step + 1}: saved, loss {loss.item():.4f}")
            if leaving:
                ctx.requeue()
        ctx.print(
            f"{options.steps} steps on {ctx.world_size} x {ctx.device.type}: "
            f"weights {digest(model)}"
        )


if __name__ == "__main__":
    main()
