"""Train one network over several ranks with torch.distributed.pipelining.

    clusterjob launch --nproc-per-node 2 examples/pipeline.py
    clusterjob launch --nproc-per-node 4 examples/pipeline.py --schedule 1f1b

Each rank holds one part of the network; micro-batches flow through the parts as a pipeline. This is
for models that do not fit on one GPU. torch.distributed.pipelining sends activations forwards and
gradients backwards. Before training, each rank compares its gradients with those of the whole
network in one process.
"""

import argparse
import copy

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from clusterjob import bootstrap

WIDTH, CLASSES = 32, 4
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def sub_networks(count: int) -> list[nn.Module]:
    """Return the network in ``count`` parts; all ranks use the same seed and get equal parts."""
    parts: list[nn.Module] = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count - 1)
    ]
    return [*parts, nn.Linear(WIDTH, CLASSES)]


def loss_of(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, labels)


def step(ctx, schedule, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    """Run one batch forwards and backwards through the pipeline; return the loss on all ranks."""
    losses: list[torch.Tensor] = []
    first, last = ctx.rank == 0, ctx.rank == ctx.world_size - 1
    arguments = (inputs,) if first else ()
    if last:
        schedule.step(*arguments, target=labels, losses=losses)
    else:
        schedule.step(*arguments)
    return ctx.reduce(float(torch.stack(losses).detach().mean()) if last else 0.0, "sum")


def gradient_error(
    part: nn.Module,
    whole: nn.Module,
    part_of_whole: nn.Module,
    inputs: torch.Tensor,
    labels: torch.Tensor,
) -> float:
    """Return the largest difference between gradients of a part and of the whole network."""
    loss_of(whole(inputs), labels).backward()
    pairs = zip(part.parameters(), part_of_whole.parameters(), strict=True)
    return max(float((own.grad - other.grad).abs().max()) for own, other in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedule", choices=SCHEDULES, default="gpipe")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    torch.set_num_threads(1)
    with bootstrap.init() as ctx:
        if ctx.world_size < 2:
            raise SystemExit(
                "a pipeline needs at least two processes: "
                "clusterjob launch --nproc-per-node 2 examples/pipeline.py"
            )
        torch.manual_seed(0)
        inputs = torch.randn(64, WIDTH).to(ctx.device)
        labels = (inputs.cpu() @ torch.randn(WIDTH, CLASSES)).argmax(dim=1).to(ctx.device)
        whole = nn.Sequential(*sub_networks(ctx.world_size)).to(ctx.device)
        # The whole network exists only for the comparison; a large model would not fit on one GPU.
        part = copy.deepcopy(whole[ctx.rank])

        stage = PipelineStage(part, ctx.rank, ctx.world_size, ctx.device)
        schedule = SCHEDULES[options.schedule](
            stage, n_microbatches=options.micro_batches, loss_fn=loss_of
        )
        optimizer = torch.optim.Adam(part.parameters(), lr=1e-2)

        first_loss = step(ctx, schedule, inputs, labels)
        largest_error = ctx.reduce(
            gradient_error(part, whole, whole[ctx.rank], inputs, labels), "max"
        )
        ctx.print(f"gradients differ from those of one process by at most {largest_error:.1e}")
        for _ in range(options.steps):
            optimizer.zero_grad()
            loss = step(ctx, schedule, inputs, labels)
            optimizer.step()
        ctx.print(
            f"loss {first_loss:.4f} before training, {loss:.4f} after, "
            f"over {ctx.world_size} sub-networks"
        )


if __name__ == "__main__":
    main()
