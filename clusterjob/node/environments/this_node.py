"""This node's part of a job: rank assignment, peers, GPUs, name, attempt and the job's id."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from clusterjob.errors import PlacementError
from clusterjob.node import contract
from clusterjob.node.environments import mlp_env, slurm_env
from clusterjob.node.environments.detection import detect, look_up
from clusterjob.node.environments.topology import (
    OWN_ADDRESS,
    Finding,
    Topology,
    whole_number,
)
from clusterjob.node.system import network, processes


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
    nodes = slurm_env.nodes_of_allocation(environ)
    if nodes > 1:
        raise PlacementError(
            f"this process runs outside srun, in an allocation of {nodes} nodes:"
            " only one would be used",
            "use `srun --ntasks-per-node=1 clusterjob launch ...`; to use this node only, set"
            " CLUSTERJOB_NNODES=1 CLUSTERJOB_NODE_RANK=0",
        )
    finding.placement = Topology(
        1,
        0,
        nproc_per_node=None,
        master_addr=OWN_ADDRESS,
        master_port=None,
        source=finding.source,
    )
    return finding


def node_of(finding: Finding) -> Topology:
    """Return the topology in a finding of `find_node`."""
    assert isinstance(finding.placement, Topology)
    return finding.placement


def gpus(finding: Finding, environ: Mapping[str, str]) -> int:
    """Return the number of GPUs that the platform's variables promise this node; 0 if none does."""
    if finding.source == slurm_env.SOURCE:
        return whole_number(environ.get("SLURM_GPUS_ON_NODE", "").strip()) or 0
    names_gpus = "GPU" in finding.evidence.get("nproc_per_node", "")  # MLP_WORKER_GPU, MA_NUM_GPUS
    return (node_of(finding).nproc_per_node or 0) if names_gpus else 0


def peers(topology: Topology, environ: Mapping[str, str]) -> list[str]:
    """Return the names or addresses of all nodes of the job; empty if the variables name none."""
    if topology.source == slurm_env.SOURCE:
        return slurm_env.peers(environ)
    if topology.source == mlp_env.SOURCE:
        return mlp_env.peers(environ, topology.nnodes)
    if topology.source == "skypilot":
        return Finding(topology.source, environ).hosts("SKYPILOT_NODE_IPS")
    return []


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return this machine's name: set by the user, else by the scheduler, else its host name."""
    return environ.get("CLUSTERJOB_HOST") or environ.get("SLURMD_NODENAME") or socket.gethostname()


def own_address(topology: Topology) -> str:
    """Return the address at which the other nodes reach this one."""
    if topology.node_rank == 0:
        return topology.master_addr
    return network.address_towards(topology.master_addr) or node_name()


def read_attempt(environ: Mapping[str, str]) -> int:
    """Return the number of the job's attempt, from 0.

    Raises:
        PlacementError: CLUSTERJOB_ATTEMPT, or else SLURM_RESTART_COUNT, is not a whole number.
    """
    # Slurm requeues a job under the same id, so the id alone does not identify an attempt.
    variable = contract.ATTEMPT if environ.get(contract.ATTEMPT) else "SLURM_RESTART_COUNT"
    text = environ.get(variable) or "0"
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise PlacementError(f"{variable}={text[:80]!r} is not a whole number")
    return int(text)


def step_id(source: str, environ: Mapping[str, str]) -> str:
    """Return ``slurm-JOB.STEP`` for a rank assignment of a Slurm step; empty for another source."""
    if source != slurm_env.SOURCE:
        return ""
    return f"slurm-{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}"


def job_id(source: str, environ: Mapping[str, str]) -> str:
    """Return the id of the job that gave a process its rank; empty if it is unknown.

    For ranks of srun it is Slurm's job id. Ranks that are set manually may span two Slurm jobs.

    Args:
        source: the family that gave the rank assignment.
        environ: the process's environment.
    """
    variable = "SLURM_JOB_ID" if source == slurm_env.SOURCE else "TORCHELASTIC_RUN_ID"
    return environ.get(contract.JOB_ID) or environ.get(variable) or ""


def supervisor(environ: Mapping[str, str], pid: int) -> tuple[str, int] | None:
    """Return the name and pid of a parent process that must not end before this node, or None.

    slurmstepd is the parent of a step's task. If it is killed, Slurm does not notice: the job stays
    RUNNING, and scancel does not reach the task. On other platforms the parent may end.

    Args:
        environ: this process's environment.
        pid: the first process of this node.
    """
    in_step = environ.get("SLURM_STEP_ID") and environ.get("CLUSTERJOB_TASK")
    return ("slurmstepd", processes.parent(pid)) if in_step else None
