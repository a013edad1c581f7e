"""Which process of the job this is, from whatever started it, or a refusal in one line."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from clusterjob.errors import PlaceError, UsageError
from clusterjob.node import contract, environments
from clusterjob.node.environments import Finding, openmpi_env, slurm_addresses, slurm_env, torch_env
from clusterjob.node.environments.topology import Topology, Worker
from clusterjob.node.system import network
from clusterjob.node.system.network import is_loopback
from clusterjob.worker import siblings

# Launchers that number their processes and say nothing of nodes: the processes count them when they
# meet.
NODES_UNKNOWN = frozenset(("openmpi", "hydra", "mvapich2", "flux"))


def find(by_hand: dict[str, str], *, checked: bool = True, timeout: float | None = None) -> Finding:
    """Return where this process stands: a finding whose place is a `Worker`, or None for a world of
    one.

    Args:
        by_hand: what the script itself says, under torch's names.
        checked: whether conflicts are raised; without, the place may be anything: the script's own
            group knows better.
        timeout: seconds to wait for rank 0, where only it can say where the others find it.

    Raises:
        UsageError: half a place by hand.
        PlaceError: the environment is half-set, contradictory, or a node's.
    """
    if by_hand and not {"RANK", "WORLD_SIZE"} <= by_hand.keys():
        raise UsageError(
            f"init was given {', '.join(name.lower() for name in by_hand)}: a place by hand needs rank and world_size"
        )
    if (
        by_hand.get("WORLD_SIZE") == "1"
        and by_hand["RANK"] == by_hand.get("LOCAL_RANK", "0") == "0"
    ):
        return Finding(source="arguments", place=None)
    if checked and by_hand:
        by_hand = _on_one_machine(_among_siblings(by_hand, timeout))
    given = _local_rank_of_argv() | by_hand
    # A place by hand is a process's, whatever else the environment speaks of.
    finding = (
        torch_env.read(os.environ | given)
        if given
        else environments.detect(environments.look(os.environ))
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
    if finding.place is not None and not isinstance(finding.place, Worker):
        script = (
            os.path.basename(sys.argv[0])
            if sys.argv and sys.argv[0].endswith(".py")
            else "train.py"
        )
        why = " (LOCAL_RANK is not set, so that RANK counts nodes)" if by_node else ""
        raise PlaceError(
            f"the environment ({finding.source}) gives the place of a node, not of a process{why}: "
            f"a launcher has to start the processes, with `clusterjob launch {script}`",
            "`clusterjob env` shows each variable and what was made of it",
        )
    _check_launcher(finding)
    return Finding(source="arguments", place=finding.place) if by_hand else finding


def _among_siblings(by_hand: dict[str, str], timeout: float | None) -> dict[str, str]:
    """Return a place by hand with the rest of it, where it is that of one of multiprocessing's
    processes, all of this machine.
    """
    addressed = {"MASTER_ADDR", "MASTER_PORT"} & (
        by_hand.keys() | {name for name, value in os.environ.items() if value}
    )
    rank, world_size = by_hand.get("RANK", ""), by_hand.get("WORLD_SIZE", "")
    here = (
        by_hand.get("LOCAL_RANK", rank) == rank
        and by_hand.get("LOCAL_WORLD_SIZE", world_size) == world_size
    )
    if addressed or not here or not siblings.are_there():
        return by_hand
    if not (rank.isdigit() and world_size.isdigit() and int(rank) < int(world_size)):
        return by_hand  # which is refused with its reason
    return _all_here(by_hand) | {
        "MASTER_ADDR": siblings.ADDRESS,
        "MASTER_PORT": str(siblings.meet(int(rank), timeout)),
    }


def _on_one_machine(by_hand: dict[str, str]) -> dict[str, str]:
    """Return a place by hand with the rest of it, where all meet at an address that means each
    machine itself: all are of this one.
    """
    given = os.environ | by_hand
    knows_more = given.get("LOCAL_RANK") or given.get("LOCAL_WORLD_SIZE")
    return (
        by_hand
        if knows_more or not is_loopback(given.get("MASTER_ADDR", ""))
        else _all_here(by_hand)
    )


def _all_here(by_hand: dict[str, str]) -> dict[str, str]:
    return by_hand | {
        "LOCAL_RANK": by_hand["RANK"],
        "LOCAL_WORLD_SIZE": by_hand["WORLD_SIZE"],
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
    }


def _check_launcher(finding: Finding) -> None:
    """Refuse a master that is mpirun's own machine, where rank 0 is told to meet the others, if
    rank 0 runs elsewhere.
    """
    worker = finding.place
    implied = finding.evidence.get("master_addr") == openmpi_env.LAUNCHER
    if (
        implied
        and isinstance(worker, Worker)
        and worker.rank == 0
        and not network.is_own(worker.topology.master_addr)
    ):
        raise PlaceError(
            f"rank 0 does not run where mpirun does, at {worker.topology.master_addr}, and nothing says where the others find it",
            "MASTER_ADDR names rank 0's machine: mpirun -x MASTER_ADDR=...",
        )


def prepare(finding: Finding) -> None:
    """Set, where the user has not, what makes torch's start quick and right: outside of our agents
    nobody else has.

    The interface and the patience of the resolver, and this process's share of the cores
    (OMP_NUM_THREADS). All of it is inherited by what the process starts.

    Args:
        finding: this process's own.
    """
    worker = finding.place
    if not isinstance(worker, Worker) or finding.source == "clusterjob":
        return
    topology = worker.topology
    threads = contract.thread_defaults(os.environ, worker.local_world_size, cpus_per_task=None)
    quiet = contract.quiet_defaults(os.environ, topology.master_addr, nnodes=topology.nnodes)
    quiet.pop("PYTHONUNBUFFERED", None)  # it is too late for that
    os.environ.update(quiet | threads)
    torch = sys.modules.get("torch")
    if threads and torch is not None:  # which has read the variable when it was imported
        torch.set_num_threads(int(threads["OMP_NUM_THREADS"]))


def _local_rank_of_argv() -> dict[str, str]:
    """Return LOCAL_RANK from ``--local-rank=N``: torch.distributed.launch of older torch says it
    there alone.
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
    """Return a finding of Slurm's with what a process makes of it: a step's only task on its node
    is a process of its own.
    """
    place = finding.place
    if finding.source != slurm_env.SOURCE or place is None:
        return finding
    if isinstance(place, Topology):
        if (place.nproc_per_node or 1) > 1:
            return finding
        place = slurm_env.as_worker(place, os.environ)
    return replace(
        finding, place=replace(place, topology=slurm_addresses.settle(place.topology, os.environ))
    )
