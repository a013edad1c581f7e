"""A daemon thread that polls for ever beside training: facebookresearch/dino-like monitors, prefetchers in NVIDIA examples."""

import threading
import time

import torch.distributed as dist


def poll():
    while True:
        time.sleep(0.01)


threading.Thread(target=poll, daemon=True).start()
dist.init_process_group("gloo")
dist.barrier()
print("rank", dist.get_rank(), "done")
dist.destroy_process_group()
