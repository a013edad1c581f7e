"""async_op=True handles and point-to-point batches: Megatron-LM, pipeline_parallel/p2p_communication.py."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
handle = dist.all_reduce(torch.ones(4), async_op=True)
received = torch.empty(2)
operations = [
    dist.P2POp(dist.isend, torch.full((2,), float(rank)), (rank + 1) % world),
    dist.P2POp(dist.irecv, received, (rank - 1) % world),
]
for request in dist.batch_isend_irecv(operations):
    request.wait()
handle.wait()
print("rank", rank, "received", received.tolist())
dist.destroy_process_group()
