"""Train a small CNN on scikit-learn's handwritten digits, on any number of processes.

    python examples/train_digits.py                                        # one process
    clusterjob launch --nproc-per-node 4 examples/train_digits.py          # four, on this machine
    clusterjob run --nodes 2 --gpus-per-node 8 examples/train_digits.py    # sixteen, on a cluster
    torchrun --nproc-per-node 4 examples/train_digits.py                   # any other launcher

The script is the same in each case: `bootstrap.init` detects the launcher and the rank.
"""

import argparse
import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

from clusterjob import bootstrap


def digits() -> tuple[Dataset, Dataset]:
    """Return (training, held-out) data: images of shape (1, 8, 8) with their labels."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16.0
    samples = TensorDataset(images, torch.tensor(data.target))
    # All processes use the same seed. With different splits, a process would train on images that
    # another process tests with.
    return random_split(samples, [0.8, 0.2], generator=torch.Generator().manual_seed(0))


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train_epoch(
    ctx, model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer
) -> tuple[float, int]:
    """Return (mean loss, number of samples) of this process."""
    model.train()
    total, seen = torch.zeros((), device=ctx.device), 0
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images.to(ctx.device)), labels.to(ctx.device))
        optimizer.zero_grad()
        loss.backward()  # DDP averages the gradients of all processes while it computes them
        optimizer.step()
        # No .item() here: it would wait for the GPU in every step.
        total += loss.detach() * len(labels)
        seen += len(labels)
    return total.item() / seen, seen


@torch.no_grad()
def accuracy(ctx, model: nn.Module, held_out: Dataset) -> tuple[float, int]:
    """Return (accuracy on the held-out digits, number of digits), equal on all processes."""
    model.eval()
    # Each process takes every world_size-th digit. A DistributedSampler pads the last batch and
    # would count some digits twice.
    share = torch.utils.data.Subset(held_out, range(ctx.rank, len(held_out), ctx.world_size))
    correct = 0
    for images, labels in DataLoader(share, batch_size=256):
        correct += int((model(images.to(ctx.device)).argmax(dim=1).cpu() == labels).sum())
    return ctx.reduce(correct, op="sum") / len(held_out), len(held_out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--batch-size",
        type=int,
        default=64,
        help="samples per step, of all processes together (default %(default)s)",
    )
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument(
        "--target",
        type=float,
        default=0.95,
        help="held-out accuracy below which the job fails (default %(default)s)",
    )
    options = parser.parse_args()

    torch.set_num_threads(1)  # on the CPU, threads slow down such a small network
    torch.manual_seed(0)
    with bootstrap.init() as ctx:
        train, held_out = digits()
        model = ctx.wrap(network())
        optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
        # The processes share one batch: the optimization does not depend on their number.
        sampler = ctx.sampler(train)
        loader = DataLoader(
            train, batch_size=max(1, options.batch_size // ctx.world_size), sampler=sampler
        )

        seconds, seen = 0.0, 0
        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)  # otherwise all epochs have the same order
            started = time.perf_counter()
            loss, samples = train_epoch(ctx, model, loader, optimizer)
            seconds += time.perf_counter() - started
            seen += ctx.reduce(samples, op="sum")
            ctx.print(f"epoch {epoch + 1}/{options.epochs}: loss {ctx.reduce(loss):.4f}")

        reached_accuracy, digits_tested = accuracy(ctx, model, held_out)
        ctx.print(
            f"{seen / seconds:.0f} samples per second on {ctx.world_size} x {ctx.device.type}"
        )
        ctx.print(f"held-out accuracy {reached_accuracy:.4f} on {digits_tested} digits")

    if ctx.is_main and reached_accuracy < options.target:
        # One failing process fails the job, and the launcher shows its message as the reason.
        sys.exit(
            f"held-out accuracy {reached_accuracy:.4f} is below the target of {options.target}"
        )


if __name__ == "__main__":
    main()
