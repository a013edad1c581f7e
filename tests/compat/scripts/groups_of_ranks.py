"""new_group for subsets of the ranks: facebookresearch/fairseq, distributed/utils.py new_groups."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
members = [list(range(start, world, 2)) for start in range(2)]
groups = [dist.new_group(ranks) for ranks in members]
mine = rank % 2
value = torch.tensor([float(rank)])
dist.all_reduce(value, group=groups[mine])
print(f"rank {rank} group {mine} sum {value.item()}")
dist.barrier()
dist.destroy_process_group()
