"""@record on main, an exception in one rank: pytorch/tutorials and torch.distributed.elastic.multiprocessing.errors."""

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        raise RuntimeError("loss is not finite")
    dist.barrier()


if __name__ == "__main__":
    main()
