"""A second gloo group with a timeout of its own beside the default one: facebookresearch/detectron2, utils/comm.py _get_global_gloo_group."""

import functools
from datetime import timedelta

import torch.distributed as dist


@functools.lru_cache
def global_gloo_group():
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=30))


def all_gather(data):
    output = [None] * dist.get_world_size(global_gloo_group())
    dist.all_gather_object(output, data, group=global_gloo_group())
    return output


def main():
    dist.init_process_group("cpu:gloo")
    print(all_gather({"rank": dist.get_rank()}))
    dist.destroy_process_group()


main()
