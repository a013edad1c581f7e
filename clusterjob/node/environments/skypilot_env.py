"""Detect a node of SkyPilot, which lists the nodes' addresses, one per line.

Source: https://docs.skypilot.co/en/latest/running-jobs/environment-variables.html
"""

from __future__ import annotations

from collections.abc import Mapping

from clusterjob.node.environments import placing
from clusterjob.node.environments.reading import Finding, Reading


def detect(environ: Mapping[str, str]) -> Finding | None:
    """Return this node's topology from SkyPilot's variables; None if they are not set."""
    reading = Reading(environ, "skypilot")
    if not reading.is_set("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS"):
        return None
    nnodes = reading.number("nnodes", "SKYPILOT_NUM_NODES")
    node_rank = reading.number("node_rank", "SKYPILOT_NODE_RANK")
    nproc_per_node = reading.number("nproc_per_node", "SKYPILOT_NUM_GPUS_PER_NODE", required=False)
    addresses: list[str] = []
    if not reading.is_set("MASTER_ADDR"):
        text = reading.text("master_addr", "SKYPILOT_NODE_IPS", required=nnodes != 1)
        addresses = (text or "").split()
    master = placing.master_or_first(reading, "SKYPILOT_NODE_IPS", addresses)
    if addresses and nnodes is not None and len(addresses) != nnodes:
        reading.conflicts.append(
            f"SKYPILOT_NODE_IPS lists {len(addresses)} addresses, SKYPILOT_NUM_NODES is {nnodes}"
        )
    return placing.node(
        reading,
        nnodes=nnodes,
        node_rank=node_rank,
        nproc_per_node=nproc_per_node,
        master=master,
    )
