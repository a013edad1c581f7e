"""Determine this process's rank assignment from its environment or from init's arguments."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from clusterjob.errors import PlacementError, UsageError
from clusterjob.node.environments import (
    detection,
    lookups,
    openmpi_env,
    slurm_addresses,
    slurm_env,
    torch_env,
    worker_defaults,
)
from clusterjob.node.environments.reading import Finding
from clusterjob.node.environments.topology import Topology, Worker
from clusterjob.node.system import network
from clusterjob.node.system.network import is_loopback
from clusterjob.worker import siblings

# Launchers that give ranks but no nodes: the processes count the nodes in their rendezvous.
NODES_UNKNOWN = frozenset(("openmpi", "hydra", "mvapich2", "flux"))


def find(given: dict[str, str], *, checked: bool = True, timeout: float | None = None) -> Finding:
    """Return this process's rank assignment.

    The placement of the finding is a `Worker`, or None for a world of one.

    Args:
        given: the assignment that the script gives to init, under torch's variable names.
        checked: whether to raise conflicts. An unchecked finding may be incomplete: it is for a
            script that has made its own process group, whose ranks are used.
        timeout: seconds to wait for rank 0, if only rank 0 has its address.

    Raises:
        UsageError: rank or world_size is missing in `given`.
        PlacementError: the environment is incomplete, contradictory, or gives a node only.
    """
    if given and not {"RANK", "WORLD_SIZE"} <= given.keys():
        raise UsageError(
            f"init was given {', '.join(name.lower() for name in given)}: "
            "rank and world_size are both required"
        )
    if given.get("WORLD_SIZE") == "1" and given["RANK"] == given.get("LOCAL_RANK", "0") == "0":
        return Finding(source="arguments", placement=None)
    if checked and given:
        given = _on_one_machine(_among_siblings(given, timeout))
    variables = _local_rank_of_argv() | given
    # Given ranks are read like torch's variables; the variables of other families are ignored.
    finding = (
        torch_env.read(os.environ | variables)
        if variables
        else detection.detect(lookups.look_up(os.environ))
    )
    if not checked:
        return finding
    by_node = finding.evidence.get("node_rank") == "RANK"
    if finding.conflicts and by_node:
        finding = replace(
            finding,
            conflicts=(*finding.conflicts, "LOCAL_RANK is not set, so that RANK counts nodes"),
        )
    finding = _alone_on_its_node(finding.check())
    if finding.placement is not None and not isinstance(finding.placement, Worker):
        script = (
            os.path.basename(sys.argv[0])
            if sys.argv and sys.argv[0].endswith(".py")
            else "train.py"
        )
        why = " (LOCAL_RANK is not set, so that RANK counts nodes)" if by_node else ""
        raise PlacementError(
            f"the environment ({finding.source}) gives a node rank, not a process rank{why}: "
            f"start the processes with a launcher, such as `clusterjob launch {script}`",
            "`clusterjob env` shows each variable and the detected environment",
        )
    _check_launcher(finding)
    return Finding(source="arguments", placement=finding.placement) if given else finding


def _among_siblings(given: dict[str, str], timeout: float | None) -> dict[str, str]:
    """Complete a given assignment if multiprocessing started all ranks on this machine."""
    addressed = {"MASTER_ADDR", "MASTER_PORT"} & (
        given.keys() | {name for name, value in os.environ.items() if value}
    )
    rank, world_size = given.get("RANK", ""), given.get("WORLD_SIZE", "")
    here = (
        given.get("LOCAL_RANK", rank) == rank
        and given.get("LOCAL_WORLD_SIZE", world_size) == world_size
    )
    if addressed or not here or not siblings.started_by_multiprocessing():
        return given
    if not (rank.isdigit() and world_size.isdigit() and int(rank) < int(world_size)):
        return given  # torch_env refuses this and gives the reason
    return _all_here(given) | {
        "MASTER_ADDR": siblings.ADDRESS,
        "MASTER_PORT": str(siblings.find_port(int(rank), timeout)),
    }


def _on_one_machine(given: dict[str, str]) -> dict[str, str]:
    """Complete a given assignment if the master address is loopback.

    All ranks are then on this machine.
    """
    variables = os.environ | given
    complete = variables.get("LOCAL_RANK") or variables.get("LOCAL_WORLD_SIZE")
    if complete or not is_loopback(variables.get("MASTER_ADDR", "")):
        return given
    return _all_here(given)


def _all_here(given: dict[str, str]) -> dict[str, str]:
    return given | {
        "LOCAL_RANK": given["RANK"],
        "LOCAL_WORLD_SIZE": given["WORLD_SIZE"],
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
    }


def _check_launcher(finding: Finding) -> None:
    """Refuse mpirun's own machine as the master address if rank 0 runs elsewhere."""
    worker = finding.placement
    implied = finding.evidence.get("master_addr") == openmpi_env.LAUNCHER
    if (
        implied
        and isinstance(worker, Worker)
        and worker.rank == 0
        and not network.is_own(worker.topology.master_addr)
    ):
        raise PlacementError(
            f"rank 0 does not run on mpirun's host {worker.topology.master_addr}, "
            "and MASTER_ADDR is not set",
            "set MASTER_ADDR to rank 0's machine: mpirun -x MASTER_ADDR=...",
        )


def prepare(finding: Finding) -> None:
    """Set default variables for torch in a process without an agent, unless they are set.

    These are the network interface, and this process's share of the cores (OMP_NUM_THREADS). Child
    processes inherit all of them.

    Args:
        finding: this process's rank assignment.
    """
    worker = finding.placement
    if not isinstance(worker, Worker) or finding.source == "clusterjob":
        return
    topology = worker.topology
    threads = worker_defaults.thread_defaults(
        os.environ, worker.local_world_size, cpus_per_task=None
    )
    quiet = worker_defaults.quiet_defaults(os.environ, topology.master_addr, nnodes=topology.nnodes)
    quiet.pop("PYTHONUNBUFFERED", None)  # the interpreter has read it already
    os.environ.update(quiet | threads)
    torch = sys.modules.get("torch")
    if threads and torch is not None:  # torch has read the variable at its import
        torch.set_num_threads(int(threads["OMP_NUM_THREADS"]))


def _local_rank_of_argv() -> dict[str, str]:
    """Return LOCAL_RANK from ``--local-rank=N``, if it is not in the environment.

    torch.distributed.launch of older torch gives it only on the command line.
    """
    if os.environ.get("LOCAL_RANK") or not (
        os.environ.get("RANK") and os.environ.get("WORLD_SIZE")
    ):
        return {}
    for word in sys.argv[1:]:
        name, _, value = word.partition("=")
        if name in ("--local-rank", "--local_rank") and value:
            return {"LOCAL_RANK": value}
    return {}


def _alone_on_its_node(finding: Finding) -> Finding:
    """Return the finding; a Slurm node with a single task becomes a process.

    If node 0's name does not resolve, Slurm gives its address.
    """
    placement = finding.placement
    if finding.source != slurm_env.SOURCE or placement is None:
        return finding
    if isinstance(placement, Topology) and (placement.nproc_per_node or 1) > 1:
        return finding
    return replace(finding, placement=slurm_addresses.as_worker(placement, os.environ))
