"""A finding as plain data: what ``clusterjob env --json`` prints."""

from __future__ import annotations

from typing import Any

from clusterjob.node.environments.reading import Finding
from clusterjob.node.topology import Topology, Worker


def describe(finding: Finding) -> dict[str, Any]:
    """Return a finding as plain data; what its level does not have is None."""
    place = finding.place
    worker = place if isinstance(place, Worker) else None
    topology: Topology | None = worker.topology if worker else place if isinstance(place, Topology) else None
    return {
        "source": finding.source,
        "level": finding.level,
        "nnodes": topology.nnodes if topology else None,
        "node_rank": topology.node_rank if topology else None,
        "nproc_per_node": topology.nproc_per_node if topology else None,
        "master_addr": topology.master_addr if topology else None,
        "master_port": topology.master_port if topology else None,
        "rank": worker.rank if worker else None,
        "local_rank": worker.local_rank if worker else None,
        "world_size": worker.world_size if worker else None,
        "local_world_size": worker.local_world_size if worker else None,
        "evidence": dict(finding.evidence),
        "ignored": [{"variable": item.variable, "why": item.why} for item in finding.ignored],
        "conflicts": list(finding.conflicts),
    }
