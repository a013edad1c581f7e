"""Detect a node of a platform on which RANK and WORLD_SIZE count nodes.

These are Kubeflow's PyTorchJob v1, Volcano's pytorch plugin, PAI DLC and Baidu's AIHC. Under
torchrun the same variables count processes; then LOCAL_RANK is set too. Sources:
https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch/,
https://volcano.sh/en/docs/pytorch_on_volcano/,
https://help.aliyun.com/zh/pai/user-guide/built-in-environment-variables,
https://cloud.baidu.com/doc/AIHC/index.html
"""

from __future__ import annotations

from collections.abc import Mapping

from clusterjob.node.environments import placing
from clusterjob.node.environments.placing import Master
from clusterjob.node.environments.reading import Finding, Reading

# Prefixes of variables that identify a platform; they only choose the name of the source.
_PLATFORMS = (
    ("pai", ("DLC_", "PAI_")),
    ("aihc", ("AIHC_",)),
    ("volcano", ("VC_", "VK_TASK_INDEX", "VOLCANO_")),
    ("pytorchjob", ("PET_",)),
)


def detect(environ: Mapping[str, str]) -> Finding | None:
    """Return this node's topology from RANK and WORLD_SIZE without LOCAL_RANK.

    Returns:
        The finding; None if RANK is not set or LOCAL_RANK is set.
    """
    reading = Reading(environ, "nodes", quoted=True)
    if not reading.is_set("RANK") or reading.is_set("LOCAL_RANK"):
        return None
    reading.source = next(
        (name for name, marks in _PLATFORMS if any(key.startswith(marks) for key in environ)),
        "nodes",
    )
    node_rank = reading.number("node_rank", "RANK")
    nnodes = reading.number("nnodes", "WORLD_SIZE")
    nproc_per_node = reading.number("nproc_per_node", "NPROC_PER_NODE", required=False)
    master = Master(
        reading.host("master_addr", "MASTER_ADDR", required=nnodes != 1),
        reading.number("master_port", "MASTER_PORT", required=False),
    )
    return placing.node(
        reading, nnodes=nnodes, node_rank=node_rank, nproc_per_node=nproc_per_node, master=master
    )
