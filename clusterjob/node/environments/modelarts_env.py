"""Detect a node of Huawei's ModelArts.

ModelArts runs on Volcano and adds MA_NUM_HOSTS and MA_NUM_GPUS.

Source: https://support.huaweicloud.com/intl/en-us/develop-modelarts/develop-modelarts-0120.html
"""

from __future__ import annotations

from collections.abc import Mapping

from clusterjob.node.environments import placing
from clusterjob.node.environments.reading import Finding, Reading


def detect(environ: Mapping[str, str]) -> Finding | None:
    """Return this node's topology from MA_NUM_HOSTS and VC_TASK_INDEX.

    Returns:
        The finding; None if MA_NUM_HOSTS is not set.
    """
    reading = Reading(environ, "modelarts", quoted=True)
    if not reading.is_set("MA_NUM_HOSTS"):
        return None
    nnodes = reading.number("nnodes", "MA_NUM_HOSTS")
    index = "VC_TASK_INDEX"
    node_rank = (
        0 if nnodes == 1 and not reading.is_set(index) else reading.number("node_rank", index)
    )
    hosts = placing.hosts(reading, "VC_WORKER_HOSTS")
    master = placing.master_or_first(reading, "VC_WORKER_HOSTS", hosts)
    if not hosts and nnodes != 1 and not reading.is_set("MASTER_ADDR"):
        reading.conflicts.append("VC_WORKER_HOSTS is not set (master_addr)")
    if hosts and nnodes is not None and len(hosts) != nnodes:
        reading.conflicts.append(
            f"VC_WORKER_HOSTS lists {len(hosts)} hosts, MA_NUM_HOSTS is {nnodes}"
        )
    nproc_per_node = reading.number("nproc_per_node", "MA_NUM_GPUS", required=False)
    return placing.node(
        reading,
        nnodes=nnodes,
        node_rank=node_rank,
        nproc_per_node=nproc_per_node,
        master=master,
    )
