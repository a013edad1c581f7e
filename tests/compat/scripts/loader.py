"""DataLoader with processes of each start method and persistent workers: pytorch/examples, imagenet/main.py; huggingface/pytorch-image-models."""

import argparse

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info


class Numbers(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        assert get_worker_info() is not None
        return torch.tensor(float(index))


def init_fn(worker_id):
    torch.manual_seed(worker_id)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--context", default="fork")
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    data = Numbers()
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(
        data, batch_size=4, sampler=sampler, num_workers=args.workers,
        multiprocessing_context=args.context, persistent_workers=args.persistent,
        worker_init_fn=init_fn,
    )  # fmt: skip
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = sum(batch.sum() for batch in loader)
        dist.all_reduce(total)
        print("epoch", epoch, "total", total.item())
    dist.destroy_process_group()
