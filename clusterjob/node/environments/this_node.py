"""Find this node's rank assignment for an agent, or refuse an environment that gives none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from clusterjob.errors import PlacementError
from clusterjob.node.environments import mlp_env, placing, slurm_addresses, slurm_env
from clusterjob.node.environments.detection import detect
from clusterjob.node.environments.lookups import look_up
from clusterjob.node.environments.reading import Finding, Reading, whole_number
from clusterjob.node.environments.topology import Topology
from clusterjob.node.system import network
from clusterjob.node.system.hostlist import expand_hostlist


def find_node(environ: Mapping[str, str]) -> Finding:
    """Return this node's placement in the job; one node if the environment names no job.

    Raises:
        PlacementError: the environment is incomplete or contradictory, belongs to one process
            (each process would then start all workers), or is a Slurm allocation of several nodes,
            outside srun.
    """
    finding = detect(look_up(environ)).check()
    if isinstance(finding.placement, Topology):
        return finding
    if finding.placement is not None:
        raise PlacementError(
            "this process is already one process of a job"
            f" ({finding.source}: {', '.join(sorted(set(finding.evidence.values())))})",
            "run `clusterjob launch` once per node; it starts all workers of the node",
        )
    nodes = slurm_env.nodes_outside_a_step(environ)
    if nodes > 1:
        raise PlacementError(
            f"this process runs outside srun, in an allocation of {nodes} nodes:"
            " only one would be used",
            "use `srun --ntasks-per-node=1 clusterjob launch ...`; to use this node only, set"
            " CLUSTERJOB_NNODES=1 CLUSTERJOB_NODE_RANK=0",
        )
    return replace(
        finding,
        placement=Topology(
            1,
            0,
            nproc_per_node=None,
            master_addr="127.0.0.1",
            master_port=None,
            source=finding.source,
        ),
    )


def node_of(finding: Finding) -> Topology:
    """Return the topology in a finding of `find_node`."""
    assert isinstance(finding.placement, Topology)
    return finding.placement


def with_reachable_master(finding: Finding, environ: Mapping[str, str]) -> Topology:
    """Return the topology in a finding of `find_node`, with an address of node 0 that resolves.

    Raises:
        PlacementError: node 0's name does not resolve here, and Slurm has no address for it.
    """
    return slurm_addresses.resolve_master_address(node_of(finding), environ)


def gpus(finding: Finding, environ: Mapping[str, str]) -> int:
    """Return the number of GPUs that the platform's variables promise this node; 0 if none does."""
    if finding.source == slurm_env.SOURCE:
        return whole_number(environ.get("SLURM_GPUS_ON_NODE", "").strip()) or 0
    names_gpus = "GPU" in finding.evidence.get("nproc_per_node", "")  # MLP_WORKER_GPU, MA_NUM_GPUS
    return (node_of(finding).nproc_per_node or 0) if names_gpus else 0


def peers(topology: Topology, environ: Mapping[str, str]) -> list[str]:
    """Return the names or addresses of all nodes of the job; empty if the variables name none."""
    if topology.source == slurm_env.SOURCE:
        listed = environ.get("SLURM_STEP_NODELIST", "")
        names = expand_hostlist(listed)
        if names and network.why_unresolvable(names[0]):  # a NodeName need not be a host name
            return slurm_addresses.node_addresses(listed, environ)
        return names
    if topology.source == mlp_env.SOURCE:
        return mlp_env.peers(environ, topology.nnodes)
    if topology.source == "skypilot":
        return placing.hosts(Reading(environ, topology.source), "SKYPILOT_NODE_IPS")
    return []
