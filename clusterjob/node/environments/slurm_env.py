"""Slurm: a step's variables, node 0's address, and the environment of Slurm's commands.

With one task per node the task is a node; with several tasks per node each task is a process.

In a batch script or in salloc's shell, outside a step, the same variables have no meaning. There
SLURM_PROCID is 0 also with SLURM_NTASKS=16, and a program that uses it waits forever
(Lightning#20776). Only a step sets SLURM_STEP_ID. The job's node lists contain all nodes of the
job; the step's lists contain the nodes of the step.

Source: srun(1), "OUTPUT ENVIRONMENT VARIABLES", https://slurm.schedmd.com/srun.html, and dumps of
Slurm 22.05.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from clusterjob.errors import PlacementError
from clusterjob.node.contract import World
from clusterjob.node.environments.topology import (
    OWN_ADDRESS,
    OWN_MASTER,
    Finding,
    Topology,
    Worker,
    candidate_ports,
    whole_number,
)
from clusterjob.node.environments.worker_variables import LAUNCH_VARIABLES
from clusterjob.node.system import network, processes
from clusterjob.node.system.ranges import expand_hostlist

SOURCE = "slurm"
# `srun_task` sets this variable to the value of RANK. It marks torch's variables as computed from
# the step's variables.
TASK_RANK = "CLUSTERJOB_TASK_RANK"

# Reserved ids of batch scripts, salloc's shell and the like, as numbers or names. Source: slurm.h
_LOWEST_OF_NO_STEP = 0xFFFFFFF0
_NO_STEPS = ("batch", "interactive", "extern")
_MAX_NODES = 65536
_TASKS = re.compile(r"([1-9]\d{0,17})(?:\(x([1-9]\d{0,17})\))?", re.ASCII)
SIGNS = "SLURM_STEP_ID SLURM_PROCID SLURM_JOB_ID"  # the family applies if one of these is set
_NPROC = "CLUSTERJOB_NPROC_PER_NODE"
_TIMEOUT = 4.0  # seconds for one scontrol command

# Inside a job all of Slurm's variables belong to that job, except these, which locate the cluster.
# In a login shell Slurm's variables are the user's defaults, such as SBATCH_ACCOUNT.
_KEEP = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
_OF_A_JOB = ("SLURM", "SBATCH_", "SRUN_", "SALLOC_", "PMI_", "PMIX_")
_NAMES_OF_A_JOB = (
    "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)

# User defaults that would change a command's answer, such as a partition filter for squeue.
_DEFAULTS_OF_ANSWERS = ("SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_")
# User defaults that would make a job differ from its record, or make sbatch wait for its end.
_DEFAULTS_OF_SHAPE = frozenset(
    f"SBATCH_{name}"
    for name in (
        "ARRAY_INX",
        "ERROR",
        "EXPORT",
        "GPUS_PER_TASK",
        "INPUT",
        "JOB_NAME",
        "NO_REQUEUE",
        "OPEN_MODE",
        "OUTPUT",
        "QUIET",
        "REQUEUE",
        "SIGNAL",
        "TEST_ONLY",
        "VERBOSE",
        "WAIT",
    )
)


# -- the rank assignment of a task -----------------------------------------------------------------


def is_step(found: Finding) -> bool:
    """Return whether this is a task of a step; outside of one, note the variables as ignored."""
    step = found.value("SLURM_STEP_ID")
    of_step = step and step.lower() not in _NO_STEPS
    if of_step and (whole_number(step) or 0) < _LOWEST_OF_NO_STEP:
        return True
    found.ignore(
        f"SLURM_STEP_ID={step} is not a step of srun"
        if step
        else "SLURM_STEP_ID is not set: this is a batch script or a shell, not a step of srun",
        *SIGNS.split(),
    )
    return False


def place(found: Finding) -> Topology | Worker | None:
    """Return this task's placement: a `Topology` with one task per node, else a `Worker`."""
    if found.value("SLURM_HET_SIZE") not in ("", "0", "1"):
        found.conflicts.append(
            "SLURM_HET_SIZE is set: the components of a heterogeneous job have no common ranks"
        )
    tasks = _tasks_per_node(found)
    _read_master(found)
    if found.conflicts:
        return None
    found.check_count("SLURM_STEP_TASKS_PER_NODE", tasks)
    if max(tasks) == 1:
        del found.evidence["local_world_size"]
        found.number("nproc_per_node", _NPROC, required=False)
        return found.node()
    found.ignore("srun starts the processes itself", _NPROC)
    found.number("rank", "SLURM_PROCID")
    found.number("local_rank", "SLURM_LOCALID")
    ntasks = found.first_set("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    world_size = found.number("world_size", ntasks)
    if world_size not in (None, sum(tasks)):
        found.conflicts.append(
            f"SLURM_STEP_TASKS_PER_NODE={found.value('SLURM_STEP_TASKS_PER_NODE')[:80]!r} "
            f"gives {sum(tasks)} tasks, and {ntasks}={world_size}"
        )
    if "master_port" not in found.numbers:
        found.text("master_port", "SLURM_JOB_ID")
        found.numbers["master_port"] = rendezvous_port(found.environ)
    # A task's own rank is used: with a cyclic distribution it cannot be computed from the node. A
    # larger node rank is refused.
    node_rank = min(found.numbers.get("node_rank", 0), len(tasks) - 1)
    found.numbers["local_world_size"] = tasks[node_rank]
    return found.worker()


def _tasks_per_node(found: Finding) -> list[int]:
    """Return the number of tasks on each node of the step; empty with a conflict.

    The variable contains a list such as ``8(x2),4``.
    """
    variable = "SLURM_STEP_TASKS_PER_NODE"
    text = found.text("local_world_size", variable)
    tasks: list[int] = []
    for item in text.split(",") if text else ():
        match = _TASKS.fullmatch(item)
        times = int(match[2] or 1) if match else 0
        if not match or len(tasks) + times > _MAX_NODES:
            found.conflicts.append(f"{variable}={text[:80]!r} is not a list of numbers of tasks")
            return []
        tasks += [int(match[1])] * times
    return tasks


def _read_master(found: Finding) -> None:
    """Read node 0's name: CLUSTERJOB_MASTER_ADDR, MASTER_ADDR or the step's first node."""
    listed = "SLURM_STEP_NODELIST"
    nodes = found.hostlist(listed)
    if found.conflicts:
        return
    found.find_master(
        found.first_set(OWN_MASTER, "MASTER_ADDR"),
        found.first_set("CLUSTERJOB_MASTER_PORT", "MASTER_PORT"),
        first=(listed, nodes[0] if nodes else ""),
        missing=listed,
    )
    if nodes and found.evidence.get("master_addr") == "MASTER_ADDR":
        short = [name.partition(".")[0] for name in (*nodes, *found.hostlist("SLURM_JOB_NODELIST"))]
        given = found.master_addr.partition(".")[0]
        if given in short and given != short[0]:
            found.conflicts.append(
                f"MASTER_ADDR={found.master_addr!r} is not the first of {listed}, {nodes[0]!r}, "
                "where rank 0 runs"
            )


# -- addresses -------------------------------------------------------------------------------------


def as_worker(placement: Topology | Worker, environ: Mapping[str, str]) -> Worker:
    """Return a step's task as a process, with an address of node 0 that resolves.

    The rank of a node's only task is the node's rank.

    Args:
        placement: the placement that `place` returned.
        environ: the environment that it was read from.

    Raises:
        PlacementError: node 0 has no address.
    """
    if isinstance(placement, Topology):
        node = replace(placement, master_port=placement.master_port or rendezvous_port(environ))
        placement = Worker(
            node, node.node_rank, local_rank=0, world_size=node.nnodes, local_world_size=1
        )
    return replace(placement, topology=resolve_master_address(placement.topology, environ))


def resolve_master_address(topology: Topology, environ: Mapping[str, str]) -> Topology:
    """Return the topology with an address of node 0 that resolves on this machine.

    A NodeName of Slurm need not be a host name; Slurm itself connects to NodeAddr.

    Args:
        topology: the detected topology; only one from Slurm is changed.
        environ: the environment that it was detected in.

    Returns:
        A new topology; the given one if its address resolves or its source is not Slurm.

    Raises:
        PlacementError: neither the resolver nor Slurm has an address for the name.
    """
    if topology.source != SOURCE:
        return topology
    name = topology.master_addr
    error = network.why_unresolvable(name)
    if not error:
        return topology
    addresses = [OWN_ADDRESS]
    if topology.nnodes > 1:
        addresses = node_addresses(name, environ)
    if not addresses:
        raise PlacementError(
            f"node 0 is {name}, which does not resolve here ({error}), and Slurm "
            "gives no address for it",
            "`export MASTER_ADDR=ADDRESS` before srun sets the address of the step's first node",
        )
    return replace(topology, master_addr=addresses[0])


def node_addresses(names: str, environ: Mapping[str, str]) -> list[str]:
    """Return NodeAddr of each node of a list from ``scontrol show node``.

    Returns:
        The addresses that resolve; empty if there is no scontrol, no answer or no such node.
    """
    if names.startswith("-"):
        return []
    argv = ["scontrol", "--oneliner", "show", "node", names]
    own = slurm_environment(environ, argv[0])
    shown = processes.output_of(argv, own, timeout=_TIMEOUT)
    found = re.findall(r"(?:^| )NodeAddr=(\S+)", shown, re.MULTILINE)
    return [address for address in found if not network.why_unresolvable(address)]


def peers(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the step's nodes, or their addresses if the names do not resolve."""
    listed = environ.get("SLURM_STEP_NODELIST", "")
    names = expand_hostlist(listed)
    if names and network.why_unresolvable(names[0]):
        return node_addresses(listed, environ)
    return names


def rendezvous_port(environ: Mapping[str, str]) -> int:
    """Return the rendezvous port of a step's tasks for a step without MASTER_PORT.

    All tasks compute the port from the job id, the step id and the restart count. Rank 0 binds it.
    clusterjob's agents do not use this port: they bind a port first and then announce it.
    """
    job, step = (environ.get(name, "").strip() for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return candidate_ports(
        f"slurm {job}.{step}", whole_number(environ.get("SLURM_RESTART_COUNT", "").strip()) or 0
    )[0]


# -- variables of workers and commands -------------------------------------------------------------


def worker_variables(world: World, local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return Slurm's variables of a worker as of a task of its own; empty outside a step.

    An agent is the only task of its node. Programs that read its rank and number of tasks would
    form worlds of one process each.

    Args:
        world: the round of the worker.
        local_rank: the worker's index on this node.
        environ: the agent's environment.
    """
    if not environ.get("SLURM_STEP_ID"):
        return {}
    count, first = str(world.world_size), world.first_rank
    return {
        "SLURM_PROCID": str(first + local_rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(world.node_rank),
        "SLURM_NTASKS": count,
        "SLURM_NPROCS": count,
        "SLURM_STEP_NUM_TASKS": count,
        "SLURM_STEP_NUM_NODES": str(world.nnodes),
        # As if all nodes had as many workers: no message has the numbers of the others.
        "SLURM_STEP_TASKS_PER_NODE": f"{world.nproc}(x{world.nnodes})",
        "SLURM_GTIDS": ",".join(map(str, range(first, first + world.nproc))),
    }


def slurm_environment(environ: Mapping[str, str], command: str) -> dict[str, str]:
    """Return the environment for a Slurm command (submitit#1814).

    Args:
        environ: this process's own environment.
        command: the command's name, such as ``sbatch``.
    """
    inside = bool(environ.get("SLURM_JOB_ID"))
    dropped = () if command == "sbatch" else _DEFAULTS_OF_ANSWERS
    return {
        name: value
        for name, value in environ.items()
        if name in _KEEP or not (_of_a_job(name, inside=inside) or name.startswith(dropped))
    }


def _of_a_job(name: str, *, inside: bool) -> bool:
    if name.startswith("CLUSTERJOB_") or name in LAUNCH_VARIABLES or name in _DEFAULTS_OF_SHAPE:
        return True
    return inside and (name.startswith(_OF_A_JOB) or name in _NAMES_OF_A_JOB)
