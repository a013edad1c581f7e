"""Train a small classifier that survives preemption: it saves when it is warned, and resumes where
it was.

    clusterjob launch --nproc-per-node 2 --warning 60 examples/train_resume.py --checkpoint model.pt
    kill -USR1 AGENT     # what a scheduler does some time before it takes the nodes away: the job
    ends with 75 CLUSTERJOB_ATTEMPT=1 clusterjob launch --nproc-per-node 2 --warning 60
    examples/train_resume.py --checkpoint model.pt

However often it is interrupted, and even when it is killed without a warning, it ends with the same
weights, bit for bit, as a run that nobody disturbed. For that a checkpoint holds all that a step
depends on: model, optimizer, the number of the step, and the state of the random numbers. The
batches depend on the step's number alone.
"""

import argparse
import hashlib
import os
from pathlib import Path

import torch
from torch import nn

from clusterjob import bootstrap


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Return (inputs, labels) of a made-up task: which of four directions a point lies in, the same
    on every process.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4096, 16, generator=generator)
    return inputs, (inputs @ torch.randn(16, 4, generator=generator)).argmax(dim=1)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))


def batch(ctx, labels: torch.Tensor, step: int, size: int) -> torch.Tensor:
    """Return the indices of this process's samples in one step, which depend on nothing else."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(step))
    return order[ctx.rank * size : (ctx.rank + 1) * size]


def save(ctx, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write a checkpoint that is whole or not there at all; every process calls it."""
    # Each process has random numbers of its own, for the dropout.
    states = torch.zeros(ctx.world_size, len(torch.get_rng_state()), dtype=torch.uint8)
    states[ctx.rank] = torch.get_rng_state()
    states = ctx.reduce(states, "sum").to(torch.uint8)
    if ctx.is_main:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": step,
            "random": states,
        }
        aside = path.with_name(f"{path.name}.new")
        with aside.open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(
            path
        )  # in one go: whoever is killed here leaves the old checkpoint or the new one
    ctx.barrier()


def resume(ctx, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint if there is one; return the step to go on with."""
    if not path.exists():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    if len(state["random"]) != ctx.world_size:
        raise SystemExit(
            f"{path} is of {len(state['random'])} processes, and here are {ctx.world_size}"
        )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(
        state["random"][ctx.rank].clone()
    )  # of a view torch 2.13 reads the wrong bytes
    return state["step"]


def digest(model: nn.Module) -> str:
    """Return a hash of the weights that tells any bit's difference."""
    tensors = sorted(model.state_dict().items())
    return hashlib.sha256(
        b"".join(tensor.cpu().numpy().tobytes() for _, tensor in tensors)
    ).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="PATH", help="where all nodes can read it"
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
        # DDP gives all processes rank 0's weights. After its first step it regroups the gradients,
        # and with that the order in which they are summed: the first step after a resume would
        # differ in the last bit. Looking for unused parameters keeps it from that.
        wrapped = ctx.wrap(model, find_unused_parameters=True)

        first = resume(ctx, options.checkpoint, model, optimizer)
        ctx.print(f"attempt {ctx.attempt}: from step {first}")
        for step in range(first, options.steps):
            chosen = batch(ctx, labels, step, options.batch_size)
            loss = nn.functional.cross_entropy(
                wrapped(inputs[chosen].to(ctx.device)), labels[chosen].to(ctx.device)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            # Processes may hear of the warning at different steps: they agree to leave at the same
            # one.
            leaving = bool(ctx.reduce(ctx.preempted, "max")) and step + 1 < options.steps
            if leaving or (step + 1) % options.save_every == 0:
                save(ctx, options.checkpoint, model, optimizer, step + 1)
                ctx.print(f"step {step + 1}: saved, loss {loss.item():.4f}")
            if leaving:
                ctx.requeue()
        ctx.print(
            f"{options.steps} steps on {ctx.world_size} x {ctx.device.type}: weights {digest(model)}"
        )


if __name__ == "__main__":
    main()
