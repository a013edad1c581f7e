"""Train a ResNet-34 on images in one folder per class, or on synthetic images.

One process; eight processes on this machine; sixteen processes on a cluster:

    python examples/classify_images/train.py --data photos
    clusterjob launch --nproc-per-node 8 examples/classify_images/train.py --data photos
    clusterjob run --nodes 2 --gpus-per-node 8 examples/classify_images/train.py --data photos

The name of a folder is the name of its class:

    photos/cats/1.jpg  photos/cats/2.jpg  photos/dogs/1.jpg  ...

Every fifth image of a class is used for testing only. The script needs Pillow.
"""

import argparse
from pathlib import Path

import torch
from images import ImageFolder, make_images
from resnet import ResNet34
from torch import nn
from torch.utils.data import DataLoader, Subset

from clusterjob import bootstrap


def train_epoch(ctx, model, loader, optimizer, scaler, *, amp: bool) -> float:
    """Return the mean loss over all processes."""
    model.train()
    total = torch.zeros((), device=ctx.device)
    half = torch.float16 if ctx.device.type == "cuda" else torch.bfloat16
    for images, labels in loader:
        with torch.autocast(ctx.device.type, dtype=half, enabled=amp):
            scores = model(images.to(ctx.device, non_blocking=True))
            loss = nn.functional.cross_entropy(scores, labels.to(ctx.device, non_blocking=True))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        total += loss.detach()
    return ctx.reduce(total.item() / len(loader))


@torch.no_grad()
def accuracy(ctx, model, held_out: ImageFolder, options) -> float:
    """Return the accuracy on the held-out images; each image counts once, on one process."""
    model.eval()
    share = Subset(held_out, range(ctx.rank, len(held_out), ctx.world_size))
    correct = 0
    for images, labels in DataLoader(share, options.batch_size, num_workers=options.workers):
        correct += int((model(images.to(ctx.device)).argmax(dim=1).cpu() == labels).sum())
    return ctx.reduce(correct, "sum") / len(held_out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="default: made-up images, in ./made_up_images"
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--batch-size",
        type=int,
        default=32,
        help="images per step and process (default %(default)s)",
    )
    parser.add_argument(
        "--size",
        type=int,
        default=224,
        help="height and width of the images, in pixels (default %(default)s)",
    )
    parser.add_argument(
        "--lr",
        type=float,
        default=3e-4,
        help="Adam's; for one process, and more with more (default %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=2,
        help="processes that read images, for each process (default %(default)s)",
    )
    parser.add_argument("--amp", action="store_true", help="mixed precision")
    parser.add_argument(
        "--sync-batchnorm",
        action="store_true",
        help="batch statistics over all processes (GPUs only)",
    )
    parser.add_argument(
        "--save",
        type=Path,
        metavar="PATH",
        help="write the weights and the names of the classes at the end",
    )
    options = parser.parse_args()

    with bootstrap.init() as ctx:
        torch.manual_seed(ctx.rank)
        data = options.data or Path("made_up_images")
        if options.data is None:
            if ctx.local_rank == 0:
                make_images(data)
            ctx.barrier()
        train, held_out = (ImageFolder(data, options.size, held_out=flag) for flag in (False, True))
        sampler = ctx.sampler(train)
        # drop_last: batch normalization cannot use a last batch of one image.
        loader = DataLoader(
            train,
            options.batch_size,
            sampler=sampler,
            num_workers=options.workers,
            drop_last=True,
            pin_memory=ctx.device.type == "cuda",
        )
        if len(loader) == 0:
            raise SystemExit(
                f"{len(train)} images are less than one batch of {options.batch_size} "
                f"on {ctx.world_size} processes"
            )
        model = ctx.wrap(ResNet34(len(train.classes)), sync_batchnorm=options.sync_batchnorm)
        # The learning rate of Adam grows with the square root of the number of processes.
        optimizer = torch.optim.Adam(model.parameters(), lr=options.lr * ctx.world_size**0.5)
        scaler = torch.amp.GradScaler(
            ctx.device.type, enabled=options.amp and ctx.device.type == "cuda"
        )
        ctx.print(
            f"{len(train)} images of {', '.join(train.classes)} to train with, "
            f"{len(held_out)} to test with"
        )
        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)
            loss = train_epoch(ctx, model, loader, optimizer, scaler, amp=options.amp)
            ctx.print(f"epoch {epoch + 1}/{options.epochs}: loss {loss:.4f}")
        ctx.print(
            f"accuracy {accuracy(ctx, model, held_out, options):.4f} "
            f"on {ctx.world_size} x {ctx.device.type}"
        )
        if options.save and ctx.is_main:
            torch.save(
                {"classes": train.classes, "model": getattr(model, "module", model).state_dict()},
                options.save,
            )


if __name__ == "__main__":
    main()
