"""broadcast_object_list, gather_object, scatter_object_list with objects of __main__: facebookresearch/detectron2 and fairseq helpers."""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass
class Metrics:
    rank: int
    loss: float


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
name = ["run-blue" if rank == 0 else None]
dist.broadcast_object_list(name, src=0)
gathered = [None] * world if rank == 0 else None
dist.gather_object(Metrics(rank, rank / 2), gathered, dst=0)
mine = [None]
dist.scatter_object_list(mine, [{"part": part} for part in range(world)] if rank == 0 else None, src=0)
print(name[0], mine[0], gathered)
dist.destroy_process_group()
