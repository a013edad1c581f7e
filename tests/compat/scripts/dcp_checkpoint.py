"""torch.distributed.checkpoint save and load: pytorch/tutorials, recipes_source/distributed_checkpoint_recipe.rst."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard


def run():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = fully_shard(torch.nn.Linear(8, 8), mesh=mesh)
    saved = model.weight.full_tensor().sum().item()
    dcp.save({"model": model.state_dict()}, checkpoint_id="checkpoint")
    torch.nn.init.zeros_(model.weight)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id="checkpoint")
    model.load_state_dict(state["model"])
    print("restored", model.weight.full_tensor().sum().item() == saved)
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
