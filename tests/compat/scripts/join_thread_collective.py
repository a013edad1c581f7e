"""Collectives from a background thread with a group of its own: asynchronous gradient averaging, local SGD examples."""

import threading

import torch
import torch.distributed as dist


def average(group, result):
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    result.append(value.item())


def main():
    dist.init_process_group("gloo")
    group = dist.new_group()
    result = []
    thread = threading.Thread(target=average, args=(group, result))
    thread.start()
    dist.barrier()
    thread.join()
    print("averaged", result)
    dist.destroy_process_group()


main()
