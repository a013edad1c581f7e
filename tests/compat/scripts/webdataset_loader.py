"""Shards split by node and by worker: webdataset/webdataset, its training notebooks."""

import io
import os
import tarfile

import torch.distributed as dist
import webdataset


def make_shards():
    for shard in range(4):
        with tarfile.open(f"shard-{shard}.tar", "w") as archive:
            for number in range(3):
                data = str(shard * 10 + number).encode()
                member = tarfile.TarInfo(f"{shard}{number}.txt")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        make_shards()
    dist.barrier()
    dataset = webdataset.WebDataset("shard-{0..3}.tar", nodesplitter=webdataset.split_by_node, shardshuffle=False).decode()
    loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=2)
    print("rank", os.environ["RANK"], sorted(int(sample["txt"]) for sample in loader))
    dist.destroy_process_group()
