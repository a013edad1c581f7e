"""Detect a node from the CLUSTERJOB_* variables.

clusterjob's rendered scripts set them; users may set them manually on bare machines.
"""

from __future__ import annotations

from collections.abc import Mapping

from clusterjob.node.environments import placing
from clusterjob.node.environments.placing import Master
from clusterjob.node.environments.reading import Finding, Reading


def detect(environ: Mapping[str, str]) -> Finding | None:
    """Return this node's topology from CLUSTERJOB_NNODES and CLUSTERJOB_NODE_RANK.

    Returns:
        The finding; None if neither variable is set.
    """
    if not environ.get("CLUSTERJOB_NNODES") and not environ.get("CLUSTERJOB_NODE_RANK"):
        return None
    reading = Reading(environ, "clusterjob")
    nnodes = reading.number("nnodes", "CLUSTERJOB_NNODES")
    node_rank = reading.number("node_rank", "CLUSTERJOB_NODE_RANK")
    nproc_per_node = reading.number("nproc_per_node", "CLUSTERJOB_NPROC_PER_NODE", required=False)
    # No default for several nodes: with localhost each node would train alone.
    master_addr = reading.host("master_addr", "CLUSTERJOB_MASTER_ADDR", required=nnodes != 1)
    master_port = reading.number("master_port", "CLUSTERJOB_MASTER_PORT", required=False)
    # A job of several nodes on one machine has a loopback address.
    return placing.node(
        reading,
        nnodes=nnodes,
        node_rank=node_rank,
        nproc_per_node=nproc_per_node,
        master=Master(master_addr, master_port),
        by_platform=False,
    )
