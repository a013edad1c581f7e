"""One rank raises after destroy_process_group: a report at the end of facebookresearch/mae-like mains."""

import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.barrier()
dist.destroy_process_group()
if rank == 1:
    print({}["accuracy"])
