"""Detect a task of a Slurm step from the variables that srun sets.

With one task per node the task is a node; with several tasks per node each task is a process.

In a batch script or in salloc's shell, outside a step, the same variables have no meaning. There
SLURM_PROCID is 0 also with SLURM_NTASKS=16, and a program that uses it waits forever
(Lightning#20776). Only a step sets SLURM_STEP_ID. The job's node lists contain all nodes of the
job; the step's lists contain the nodes of the step.

Source: srun(1), "OUTPUT ENVIRONMENT VARIABLES", https://slurm.schedmd.com/srun.html, and dumps of
Slurm 22.05.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from clusterjob.errors import PlacementError
from clusterjob.node.contract import World
from clusterjob.node.environments import placing
from clusterjob.node.environments.candidate_ports import candidates
from clusterjob.node.environments.placing import Master, Ranks
from clusterjob.node.environments.reading import NOWHERE, Finding, Ignored, Reading, whole_number
from clusterjob.node.environments.topology import Topology, Worker
from clusterjob.node.system.hostlist import expand_hostlist
from clusterjob.node.system.network import is_loopback

SOURCE = "slurm"
# `slurm_task` sets this variable to the value of RANK. It marks torch's variables as computed from
# the step's variables.
TASK_RANK = "CLUSTERJOB_TASK_RANK"

# Reserved ids of batch scripts, salloc's shell and the like, as numbers or names. Source: slurm.h
_LOWEST_OF_NO_STEP = 0xFFFFFFF0
_NO_STEPS = ("batch", "interactive", "extern")
_MAX_NODES = 65536
_LONGEST_LIST = 32768  # characters of the list of nodes in a message
_SIGNS = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_JOB_ID")


def detect(environ: Mapping[str, str]) -> Finding | None:
    """Return this task's rank assignment: a `Topology` with one task per node, else a `Worker`.

    Returns:
        The finding; outside a step its source is ``none``. None without Slurm's variables.
    """
    step = environ.get("SLURM_STEP_ID", "").strip()
    number = whole_number(step)
    if step.lower() in ("", *_NO_STEPS) or (number is not None and number >= _LOWEST_OF_NO_STEP):
        return _no_step(environ, step)
    reading = Reading(environ, SOURCE)
    if reading.number("step", "SLURM_STEP_ID") is None:
        return reading.finding(None)
    del reading.evidence["step"]
    if environ.get("SLURM_HET_SIZE", "").strip() not in ("", "0", "1"):
        reading.conflicts.append(
            "SLURM_HET_SIZE is set: the components of a heterogeneous job have no common ranks"
        )
        return reading.finding(None)
    return _place(reading)


def nodes_outside_a_step(environ: Mapping[str, str]) -> int:
    """Return the number of nodes of the allocation if this runs in it, but outside its steps.

    This is a batch script or salloc's shell. Elsewhere the number is 0.
    """
    finding = detect(environ)
    if finding is None or finding.source != NOWHERE:
        return 0
    count = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or ""
    return whole_number(count.strip()) or 0


def as_worker(topology: Topology, environ: Mapping[str, str]) -> Worker:
    """Return a step's only task on its node as a process; its rank is the node's rank.

    Args:
        topology: the topology that `detect` returned.
        environ: the environment that it was detected in.

    Raises:
        PlacementError: no variable gives the rendezvous port.
    """
    if topology.master_port is None and not environ.get("SLURM_JOB_ID", "").strip():
        raise PlacementError("SLURM_JOB_ID is not set (master_port)")
    node = replace(topology, master_port=topology.master_port or rendezvous_port(environ))
    return Worker(
        node, topology.node_rank, local_rank=0, world_size=topology.nnodes, local_world_size=1
    )


def rendezvous_port(environ: Mapping[str, str]) -> int:
    """Return the rendezvous port of a step's tasks for a step without MASTER_PORT.

    All tasks compute the port from the job id, the step id and the restart count. Rank 0 binds it.
    clusterjob's agents do not use this port: they bind a port first and then announce it.
    """
    job, step = (environ.get(name, "").strip() for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return candidates(
        f"slurm {job}.{step}", whole_number(environ.get("SLURM_RESTART_COUNT", "").strip()) or 0
    )[0]


def tasks_per_node(counts: Sequence[int]) -> str:
    """Return numbers of tasks in Slurm's form: ``8(x2),4``."""
    runs = [(count, len([*same])) for count, same in itertools.groupby(counts)]
    return ",".join(f"{count}(x{times})" if times > 1 else f"{count}" for count, times in runs)


def nodes_of_round(hosts: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the names of a round's nodes; empty if they are the step's, or outside a step.

    Args:
        hosts: the nodes that run workers, in the order of their ranks.
        environ: the coordinator's environment.
    """
    listed, text = environ.get("SLURM_STEP_NODELIST", ""), ",".join(hosts)
    with contextlib.suppress(PlacementError):
        if expand_hostlist(listed) == [*hosts]:
            return ""
    return text if listed and len(text) <= _LONGEST_LIST else ""


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
    nodes = {"SLURM_STEP_NODELIST": world.step_nodes} if world.step_nodes else {}
    return nodes | {
        "SLURM_PROCID": str(first + local_rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(world.node_rank),
        "SLURM_NTASKS": count,
        "SLURM_NPROCS": count,
        "SLURM_STEP_NUM_TASKS": count,
        "SLURM_STEP_NUM_NODES": str(world.nnodes),
        "SLURM_STEP_TASKS_PER_NODE": world.tasks_per_node,
        "SLURM_GTIDS": ",".join(map(str, range(first, first + world.nproc))),
    }


def _no_step(environ: Mapping[str, str], step: str) -> Finding | None:
    seen = [name for name in _SIGNS if environ.get(name, "").strip()]
    if not seen:
        return None
    why = (
        f"SLURM_STEP_ID={step} is not a step of srun"
        if step
        else "SLURM_STEP_ID is not set: this is a batch script or a shell, not a step of srun"
    )
    return Finding(NOWHERE, None, ignored=tuple(Ignored(name, why) for name in seen))


def _place(reading: Reading) -> Finding:
    environ = reading.environ
    nnodes = reading.number("nnodes", "SLURM_STEP_NUM_NODES")
    node_rank = reading.number("node_rank", "SLURM_NODEID")
    rank = reading.number("rank", "SLURM_PROCID")
    local_rank = reading.number("local_rank", "SLURM_LOCALID")
    ntasks = reading.first_set("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    world_size = reading.number("world_size", ntasks)
    tasks = _tasks_per_node(reading)
    master = Master(_master_addr(reading, nnodes), _master_port(reading))
    nproc_per_node = reading.number("nproc_per_node", "CLUSTERJOB_NPROC_PER_NODE", required=False)
    if nnodes is None or node_rank is None or not tasks or reading.conflicts:
        return reading.finding(None)
    if (len(tasks), sum(tasks)) != (nnodes, world_size):
        reading.conflicts.append(
            f"SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE'][:80]!r} gives "
            f"{sum(tasks)} tasks on {len(tasks)} nodes, but "
            f"SLURM_STEP_NUM_NODES={nnodes} and {ntasks}={world_size}"
        )
        return reading.finding(None)
    if max(tasks) == 1:
        for name in ("rank", "local_rank", "world_size", "local_world_size"):
            reading.evidence.pop(name, None)
        return placing.node(
            reading,
            nnodes=nnodes,
            node_rank=node_rank,
            nproc_per_node=nproc_per_node,
            master=master,
            by_platform=False,
        )
    if nproc_per_node is not None:
        reading.evidence.pop("nproc_per_node")
        placing.ignore(reading, "srun starts the processes itself", "CLUSTERJOB_NPROC_PER_NODE")
    # The port needs a job id: without it all jobs would share one port.
    if master.port is None and reading.text("master_port", "SLURM_JOB_ID", required=False):
        master = replace(master, port=rendezvous_port(environ))
    # A task's own rank is used: with a cyclic distribution it cannot be computed from the node.
    local_world_size = tasks[min(node_rank, nnodes - 1)]  # a larger node rank is refused
    return placing.worker(
        reading,
        Ranks(rank, world_size, local_rank=local_rank, local_world_size=local_world_size),
        master=master,
        node_rank=node_rank,
        nnodes=nnodes,
        refuse_loopback=False,
    )


def _tasks_per_node(reading: Reading) -> list[int]:
    """Return the number of tasks on each node of the step; empty with a conflict.

    The variable contains a list such as ``8(x2),4``.
    """
    variable = "SLURM_STEP_TASKS_PER_NODE"
    text = reading.text("local_world_size", variable)
    if text is None:
        return []
    tasks: list[int] = []
    for item in text.split(","):
        count, _, times = item.partition("(x")
        number, repeat = whole_number(count), whole_number(times.removesuffix(")")) if times else 1
        if (
            not number
            or not repeat
            or (times and not times.endswith(")"))
            or len(tasks) + repeat > _MAX_NODES
        ):
            reading.conflicts.append(f"{variable}={text[:80]!r} is not a list of numbers of tasks")
            return []
        tasks += [number] * repeat
    return tasks


def _master_addr(reading: Reading, nnodes: int | None) -> str | None:
    """Return node 0's name: CLUSTERJOB_MASTER_ADDR, MASTER_ADDR or the step's first node."""
    if reading.is_set("CLUSTERJOB_MASTER_ADDR"):
        return reading.host("master_addr", "CLUSTERJOB_MASTER_ADDR")
    given = reading.host("master_addr", "MASTER_ADDR", required=False)
    if given is not None and is_loopback(given) and nnodes != 1:
        reading.conflicts.append(
            f"MASTER_ADDR={given[:80]!r} is a loopback address, but there are {nnodes} nodes "
            "(master_addr): set node 0's address in the network"
        )
        return None
    nodes = _hosts(reading, "SLURM_STEP_NODELIST", required=given is None)
    if given is None:
        if nodes and is_loopback(nodes[0]) and nnodes != 1:
            reading.conflicts.append(
                f"SLURM_STEP_NODELIST begins with {nodes[0]!r}, but there are {nnodes} nodes "
                "(master_addr)"
            )
        return nodes[0] if nodes else None
    whole = "SLURM_JOB_NODELIST"
    is_same = reading.value(whole) == reading.value("SLURM_STEP_NODELIST")
    more = [] if is_same else _hosts(reading, whole, required=False)
    others = {name.partition(".")[0] for name in [*nodes[1:], *more]}
    if nodes and given.partition(".")[0] in others - {nodes[0].partition(".")[0]}:
        reading.conflicts.append(
            f"MASTER_ADDR={given[:80]!r} is not the first of SLURM_STEP_NODELIST, "
            f"{nodes[0]!r}, where rank 0 runs"
        )
        return None
    return given


def _hosts(reading: Reading, variable: str, *, required: bool) -> list[str]:
    # A list that is only compared is no evidence.
    text = reading.text("master_addr", variable) if required else reading.value(variable)
    if not text:
        return []
    try:
        hosts = expand_hostlist(text)
    except PlacementError as error:
        reading.conflicts.append(f"{variable}: {error.message}")
        return []
    if not hosts:
        reading.conflicts.append(f"{variable}={text[:80]!r} names no host (master_addr)")
    return hosts


def _master_port(reading: Reading) -> int | None:
    variable = reading.first_set("CLUSTERJOB_MASTER_PORT", "MASTER_PORT")
    return reading.number("master_port", variable, required=False)
