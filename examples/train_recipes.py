"""Train a small classifier with the recipes of larger trainings; each recipe is an option.

    python examples/train_recipes.py                       # one process
    clusterjob launch --nproc-per-node 2 examples/train_recipes.py              # DDP
    clusterjob launch --nproc-per-node 2 examples/train_recipes.py --amp        # mixed precision
    clusterjob launch --nproc-per-node 2 examples/train_recipes.py --batch-size 16 --accumulate 4
    clusterjob launch --nproc-per-node 2 examples/train_recipes.py --sync-batchnorm    # on GPUs
    clusterjob launch --nproc-per-node 2 examples/train_recipes.py --tensorboard runs

All of them use a sampler with a new order in each epoch, the initial weights of rank 0, a learning
rate proportional to the number of processes, an evaluation that counts each sample once, and output
from the main process only.
"""

import argparse
import contextlib

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from clusterjob import bootstrap


def samples() -> tuple[Dataset, Dataset]:
    """Return (training, held-out) samples of a synthetic task: points in four classes."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2048 + 509, 16, generator=generator)
    labels = (inputs @ torch.randn(16, 4, generator=generator)).argmax(dim=1)
    return TensorDataset(inputs[:2048], labels[:2048]), TensorDataset(inputs[2048:], labels[2048:])


def network(*, batchnorm: bool) -> nn.Module:
    middle = [nn.BatchNorm1d(64)] if batchnorm else []
    return nn.Sequential(nn.Linear(16, 64), *middle, nn.ReLU(), nn.Linear(64, 4))


def train_epoch(ctx, model, loader, optimizer, scaler, options) -> float:
    """Train one epoch with an optimizer step every `options.accumulate` batches.

    Return the mean loss over all processes.
    """
    model.train()
    total = torch.zeros((), device=ctx.device)
    half = torch.float16 if ctx.device.type == "cuda" else torch.bfloat16
    for number, (inputs, labels) in enumerate(loader, start=1):
        stepping = number % options.accumulate == 0
        # Between steps, each process adds up its gradients; no_sync() keeps DDP from sending them.
        synchronization = (
            model.no_sync()
            if not stepping and hasattr(model, "no_sync")
            else contextlib.nullcontext()
        )
        with synchronization:
            with torch.autocast(ctx.device.type, dtype=half, enabled=options.amp):
                loss = nn.functional.cross_entropy(
                    model(inputs.to(ctx.device)), labels.to(ctx.device)
                )
            scaler.scale(loss / options.accumulate).backward()  # the mean over the large batch
        if stepping:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        total += loss.detach()
    return ctx.reduce(total.item() / len(loader))


@torch.no_grad()
def evaluate(ctx, model: nn.Module, held_out: Dataset) -> tuple[int, int]:
    """Return (correctly classified samples, samples) over all processes."""
    model.eval()
    # Each process takes every world_size-th sample. A DistributedSampler pads the last batch and
    # would count some samples twice.
    share = Subset(held_out, range(ctx.rank, len(held_out), ctx.world_size))
    correct = seen = 0
    for inputs, labels in DataLoader(share, batch_size=256):
        correct += int((model(inputs.to(ctx.device)).argmax(dim=1).cpu() == labels).sum())
        seen += len(labels)
    return ctx.reduce(correct, "sum"), ctx.reduce(seen, "sum")


def writer_to(ctx, folder: str):
    """Return a TensorBoard writer on the main process, None on the others."""
    if not (folder and ctx.is_main):
        return None
    from torch.utils.tensorboard import SummaryWriter  # from the package tensorboard

    return SummaryWriter(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--batch-size",
        type=int,
        default=64,
        help="samples per process and backward pass (default %(default)s)",
    )
    parser.add_argument(
        "--accumulate",
        type=int,
        default=1,
        metavar="N",
        help="backward passes per step of the optimizer",
    )
    parser.add_argument(
        "--lr",
        type=float,
        default=0.1,
        help="for one process; it is multiplied by their number (default %(default)s)",
    )
    parser.add_argument(
        "--backend", choices=("nccl", "gloo"), help="default: nccl on GPUs, gloo elsewhere"
    )
    parser.add_argument(
        "--amp",
        action="store_true",
        help="mixed precision: float16 with a GradScaler on GPUs, bfloat16 on the CPU",
    )
    parser.add_argument(
        "--batchnorm", action="store_true", help="a network with batch normalisation"
    )
    parser.add_argument(
        "--sync-batchnorm",
        action="store_true",
        help="and statistics over all processes (GPUs only)",
    )
    parser.add_argument(
        "--tensorboard", default="", metavar="FOLDER", help="write curves for TensorBoard"
    )
    parser.add_argument("--save", default="", metavar="PATH", help="write the weights at the end")
    options = parser.parse_args()

    torch.set_num_threads(1)
    with bootstrap.init(options.backend) as ctx:
        # Each seed gives different weights and dropout; wrap() copies rank 0's weights to all.
        torch.manual_seed(ctx.rank)
        model = ctx.wrap(
            network(batchnorm=options.batchnorm or options.sync_batchnorm),
            sync_batchnorm=options.sync_batchnorm,
        )
        fingerprint = float(
            sum(parameter.double().abs().sum() for parameter in model.parameters()).detach()
        )
        same = ctx.reduce(fingerprint, "min") == ctx.reduce(fingerprint, "max")
        ctx.print(
            f"initial weights: {'the same' if same else 'different'} on {ctx.world_size} processes"
        )

        # The batch of all processes is world_size times the batch of one process; the learning rate
        # grows with it (arXiv:1706.02677).
        lr = options.lr * ctx.world_size
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        scaler = torch.amp.GradScaler(
            ctx.device.type, enabled=options.amp and ctx.device.type == "cuda"
        )
        train, held_out = samples()
        sampler = ctx.sampler(train)
        loader = DataLoader(train, batch_size=options.batch_size, sampler=sampler, drop_last=True)
        writer = writer_to(ctx, options.tensorboard)
        ctx.print(f"learning rate {lr:g}")
        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)  # otherwise all epochs have the same order
            first = next(iter(sampler))
            loss = train_epoch(ctx, model, loader, optimizer, scaler, options)
            correct, seen = evaluate(ctx, model, held_out)
            ctx.print(
                f"epoch {epoch + 1}/{options.epochs}: loss {loss:.4f}, "
                f"accuracy {correct / seen:.4f}, first sample {first}"
            )
            if writer is not None:
                writer.add_scalar("loss/train", loss, epoch)
                writer.add_scalar("accuracy/held-out", correct / seen, epoch)
        if writer is not None:
            writer.close()
        ctx.print(
            f"held-out accuracy {correct / seen:.4f}: {correct} of {seen} "
            f"on {ctx.world_size} x {ctx.device.type} by {ctx.backend}"
        )
        if options.save and ctx.is_main:
            torch.save(getattr(model, "module", model).state_dict(), options.save)


if __name__ == "__main__":
    main()
