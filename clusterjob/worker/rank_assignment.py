"""Determine this process's rank assignment from its environment or from init's arguments."""

from __future__ import annotations

import itertools
import os
import sys

from clusterjob.errors import PlacementError, UsageError
from clusterjob.node.environments import (
    detection,
    families,
    slurm_env,
    worker_variables,
)
from clusterjob.node.environments.topology import Finding, Topology, Worker, candidate_ports
from clusterjob.node.system import network
from clusterjob.node.system.network import is_loopback

_NEEDED = ("RANK", "WORLD_SIZE")  # of an assignment that the script gives
_rounds = itertools.count()  # groups of this process for which it has computed a port


def find(given: dict[str, str], *, checked: bool = True) -> Finding:
    """Return this process's rank assignment.

    The placement of the finding is a `Worker`, or None for a world of one.

    Args:
        given: the assignment that the script gives to init, under torch's variable names.
        checked: whether to raise conflicts. An unchecked finding may be incomplete: it is for a
            script that has made its own process group, whose ranks are used.

    Raises:
        UsageError: rank or world_size is missing in `given`.
        PlacementError: the environment is incomplete, contradictory, or gives a node only.
    """
    if given and not given.keys() >= {*_NEEDED}:
        raise UsageError(
            f"init was given {', '.join(name.lower() for name in given)}: "
            "rank and world_size are both required"
        )
    if given.get("WORLD_SIZE") == "1" and given["RANK"] == given.get("LOCAL_RANK", "0") == "0":
        return Finding("arguments")
    # Given ranks are read like torch's variables; the variables of other families are ignored.
    if given:
        finding = families.read_torch(os.environ | (_complete(given) if checked else given))
    else:
        finding = detection.detect(detection.look_up(os.environ))
    if not checked:
        return finding
    counts_nodes = finding.evidence.get("node_rank") == "RANK"
    why = "LOCAL_RANK is not set, so that RANK counts nodes"
    if finding.conflicts and counts_nodes:
        finding.conflicts.append(why)
    placement = finding.check().placement
    if (
        finding.source == slurm_env.SOURCE
        and placement is not None
        and (isinstance(placement, Worker) or placement.nproc_per_node in (None, 1))
    ):
        placement = finding.placement = slurm_env.as_worker(placement, os.environ)
    if isinstance(placement, Topology):
        raise PlacementError(
            f"the environment ({finding.source}) gives a node rank, not a process rank"
            f"{f' ({why})' if counts_nodes else ''}: "
            "start the processes with a launcher, such as `clusterjob launch SCRIPT`",
            "`clusterjob env` shows each variable and the detected environment",
        )
    if placement is not None and finding.evidence.get("master_addr") == families.MPIRUN_ADDRESS:
        address = placement.topology.master_addr
        if placement.rank == 0 and not network.is_own(address):
            raise PlacementError(
                f"rank 0 does not run on mpirun's host {address}, and MASTER_ADDR is not set",
                "set MASTER_ADDR to rank 0's machine: mpirun -x MASTER_ADDR=...",
            )
    if given:
        finding.source = "arguments"
    return finding


def _complete(given: dict[str, str]) -> dict[str, str]:
    """Complete a given assignment if all ranks are on this machine.

    They are if the master address is loopback, or is not set and multiprocessing has started them.
    """
    variables = {name: value for name, value in os.environ.items() if value} | given
    if variables.keys().isdisjoint(("MASTER_ADDR", "MASTER_PORT")):
        multiprocessing = sys.modules.get("multiprocessing")
        if multiprocessing is None or multiprocessing.parent_process() is None:
            return given
        if any(given.get(f"LOCAL_{name}", given[name]) != given[name] for name in _NEEDED):
            return given  # they are on several machines
        # Only the children of one parent have its key, so that they alone compute this port.
        key = f"{multiprocessing.current_process().authkey.hex()} {os.getppid()}"
        port = candidate_ports(key, next(_rounds))[0]
        given = given | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    elif (
        not is_loopback(variables.get("MASTER_ADDR", ""))
        or "LOCAL_RANK" in variables
        or "LOCAL_WORLD_SIZE" in variables
    ):
        return given
    return given | {
        "LOCAL_RANK": given["RANK"],
        "LOCAL_WORLD_SIZE": given["WORLD_SIZE"],
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
    }


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
    threads = worker_variables.thread_defaults(
        os.environ, worker.local_world_size, cpus_per_task=None
    )
    quiet = worker_variables.quiet_defaults(
        os.environ, topology.master_addr, nnodes=topology.nnodes
    )
    quiet.pop("PYTHONUNBUFFERED", None)  # the interpreter has read it already
    os.environ.update(quiet | threads)
    torch = sys.modules.get("torch")
    if threads and torch is not None:  # torch has read the variable at its import
        torch.set_num_threads(int(threads["OMP_NUM_THREADS"]))
