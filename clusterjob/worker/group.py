"""Find a worker's rank, make or adopt its process group, and return its context."""

from __future__ import annotations

import itertools
import os
import socket
import sys
from datetime import timedelta
from typing import Any

from clusterjob.errors import PlacementError, RendezvousError, UsageError
from clusterjob.node.environments import families, slurm_env, this_node, worker_variables
from clusterjob.node.environments.topology import Finding, Topology, Worker, candidate_ports
from clusterjob.node.system import network, processes
from clusterjob.node.workers import torch_patches
from clusterjob.worker import rendezvous
from clusterjob.worker.context import Context, watch
from clusterjob.worker.rendezvous import GroupStore

_NEEDED = ("RANK", "WORLD_SIZE")  # of an assignment that the script gives
_rounds = itertools.count()  # groups of this process for which it has computed a port
# Launchers that give ranks but no nodes: the processes count the nodes by their hosts.
_NODES_UNKNOWN = frozenset(("openmpi", "hydra", "mvapich2", "flux"))


# -- the rank --------------------------------------------------------------------------------------


def find_rank(given: dict[str, str], *, checked: bool = True) -> Finding:
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
        finding = families.TORCH.read(
            Finding("env", os.environ | (_complete(given) if checked else given))
        )
    else:
        finding = this_node.detect(this_node.look_up(os.environ))
    if not checked:
        return finding
    placement = finding.check().placement
    if (
        finding.source == slurm_env.SOURCE
        and placement is not None
        and (isinstance(placement, Worker) or placement.nproc_per_node in (None, 1))
    ):
        placement = finding.placement = slurm_env.as_worker(placement, os.environ)
    if isinstance(placement, Topology):
        is_rank = finding.evidence.get("node_rank") == "RANK"
        raise PlacementError(
            f"the environment ({finding.source}) gives a node rank, not a process rank"
            f"{' (LOCAL_RANK is not set, so that RANK counts nodes)' if is_rank else ''}: "
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
        import multiprocessing

        on_several = any(given.get(f"LOCAL_{name}", given[name]) != given[name] for name in _NEEDED)
        if on_several or multiprocessing.parent_process() is None:
            return given
        # Only the children of one parent have its key, so that they alone compute this port.
        key = f"{multiprocessing.current_process().authkey.hex()} {os.getppid()}"
        port = candidate_ports(key, next(_rounds))[0]
        given = given | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    elif (
        not network.is_loopback(variables.get("MASTER_ADDR", ""))
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
    threads = worker_variables.thread_defaults(
        os.environ, worker.local_world_size, cpus_per_task=None
    )
    topology = worker.topology
    quiet = worker_variables.quiet_defaults(
        os.environ, topology.master_addr, nnodes=topology.nnodes
    )
    quiet.pop("PYTHONUNBUFFERED", None)  # for child processes, it would only be slow
    os.environ.update(quiet | threads)
    torch = sys.modules.get("torch")
    if threads and torch is not None:  # torch has read the variable at its import
        torch.set_num_threads(int(threads["OMP_NUM_THREADS"]))


# -- the group -------------------------------------------------------------------------------------


def make(
    finding: Finding, backend: str | None, timeout: float | None, *, process_group: bool | None
) -> Context:
    """Return a new context, with a new process group if the script requests one.

    Args:
        finding: this process's rank assignment.
        backend: the backend that the script requests; None for this machine's default.
        timeout: seconds after which a collective, or the rendezvous of all ranks, fails; None for
            torch's default.
        process_group: whether to make a process group; None to make one in every launched process.

    Raises:
        PlacementError: the assignment belongs to a node, or has no port.
        RendezvousError: the processes did not find each other.
        UsageError: this machine or this torch does not have the backend or the process group.
    """
    import torch

    worker: Any = finding.placement
    kind, gpus = accelerators()
    check_gpus(worker, gpus, process_group=process_group)
    backend = choose_backend(backend, gpus, kind=kind)
    context = _context_at(worker, finding.source)
    _use_device(context, kind, gpus)
    if process_group or (process_group is None and worker is not None):
        if not torch.distributed.is_available():
            raise UsageError(
                "this torch was built without torch.distributed: "
                "init(process_group=False) works without it"
            )
        try:
            store = _make_group(worker, backend, timeout=timeout, device=context.device)
        finally:
            watch()
        context.join_group(owned=True, store=store)
        if finding.source in _NODES_UNKNOWN:
            _count_nodes(context)
    elif worker is not None:
        watch()
    return context


def adopt(finding: Finding, backend: str | None, *, process_group: bool | None) -> Context:
    """Return a context around the process group that the script has made itself.

    Args:
        finding: this process's rank assignment, which may differ from its rank in the group.
        backend: the backend that the script requests.
        process_group: the argument of `init`.

    Raises:
        UsageError: the arguments do not fit the group.
    """
    import torch.distributed as dist

    if process_group is False:
        raise UsageError(
            "init(process_group=False), but the script has initialised "
            "torch's default process group already"
        )
    worker: Any = finding.placement
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # A node's assignment has no rank, and the script may number the group's ranks in another order.
    if (getattr(worker, "rank", None), getattr(worker, "world_size", None)) == (rank, world_size):
        context = _context_at(worker, finding.source)
    else:
        context = Context(source="process group", rank=rank, world_size=world_size)
        _count_nodes(context)
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    _use_device(context, *accelerators(), bound=bound)
    context.join_group(owned=False)
    if backend is not None and backend != context.backend:
        raise UsageError(
            f"init(backend={backend!r}), but the script has initialised "
            f"the process group with {context.backend}"
        )
    watch()
    return context


def load_functional() -> None:
    """Import torch.distributed.nn.functional before there is a process group, if torch has it.

    The import stores the current default group in default arguments of functions. A group that
    exists at that time is kept forever: gloo's threads outlive destroy_process_group() and
    sometimes abort the process when the interpreter exits (pytorch#179291). torch's first optimizer
    imports the module too.
    """
    import torch.distributed as dist

    if dist.is_available():
        import torch.distributed.nn.functional  # noqa: F401


def _make_group(
    worker: Worker | None, backend: str, timeout: float | None, device: Any
) -> GroupStore | None:
    """Make the default process group.

    Returns:
        Its store; None in a world of one without a launcher.
    """
    import torch.distributed as dist

    load_functional()
    options: dict[str, Any] = {
        "backend": backend,
        "timeout": None if timeout is None else timedelta(seconds=timeout),
        # With a device, torch makes NCCL's communicator in this call: errors appear now, and
        # barriers need not guess a device.
        "device_id": device if backend == "nccl" else None,
    }
    if worker is None:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **options)
        return None
    seconds = timeout or rendezvous.DEFAULT_TIMEOUT
    torch_patches.tell("rendezvous")
    try:
        place = rendezvous.open_store(worker, seconds)
        own = rendezvous.own_facts(worker, device, backend=backend)
        rendezvous.join(place, own, timeout=seconds)
        with rendezvous.forming(place):
            dist.init_process_group(
                store=place.torch_store, rank=worker.rank, world_size=worker.world_size, **options
            )
    except RuntimeError as error:  # torch's DistError is a RuntimeError
        store_address = network.with_port(*rendezvous.address_of(worker))
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise RendezvousError(
            f"rank {worker.rank} of {worker.world_size} could not form the process group "
            f"({backend}, store at {store_address}): {reason}"
        ) from error
    return place


def _context_at(worker: Worker | None, source: str) -> Context:
    if worker is None:
        return Context(source=source)
    topology = worker.topology
    return Context(
        source=source,
        rank=worker.rank,
        local_rank=worker.local_rank,
        world_size=worker.world_size,
        local_world_size=worker.local_world_size,
        node_rank=topology.node_rank,
        nnodes=topology.nnodes,
        master_addr=topology.master_addr,
        master_port=topology.master_port,
    )


def _count_nodes(context: Context) -> None:
    """Set the node, and the rank on it, of a process of a group with ranks but no node ranks."""
    import torch.distributed as dist

    own = f"{socket.gethostname()} {processes.boot_id()}"
    hosts: list[str] = [""] * context.world_size
    dist.all_gather_object(hosts, own)
    nodes = list(dict.fromkeys(hosts))
    context.node_rank, context.nnodes = nodes.index(own), len(nodes)
    context.local_rank = hosts[: context.rank].count(own)
    context.local_world_size = hosts.count(own)


# -- devices ---------------------------------------------------------------------------------------


def accelerators() -> tuple[str, int]:
    """Return torch's device type for this machine's GPUs, and the number that torch can use.

    torch calls ROCm's GPUs ``cuda`` too.
    """
    import torch

    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return kind, int(module.device_count())
    return "cuda", 0


def choose_backend(asked: str | None, gpus: int, kind: str = "cuda") -> str:
    """Return the backend of the process group on this machine.

    Args:
        asked: the backend that the script requests; None for the default.
        gpus: number of GPUs that torch can use.
        kind: torch's device type for them: ``cuda`` (also for AMD) or ``xpu``.

    Raises:
        UsageError: nccl is requested, but torch cannot use any GPU.
    """
    if asked == "nccl" and not (gpus and kind == "cuda"):
        raise UsageError(
            "the backend nccl needs a GPU, and torch sees none (torch.cuda.is_available() is False)"
        )
    return asked or ("nccl" if gpus and kind == "cuda" else "gloo")


def _use_device(context: Context, kind: str, gpus: int, bound: Any = None) -> None:
    """Set the device of a process: ``cpu``, or the GPU with its local rank.

    Args:
        context: that of the process.
        kind: torch's device type for the GPUs.
        gpus: number of GPUs that torch can use. It is 1 if the launcher shows each process only
            its own GPU (mace#435).
        bound: the device of its group, if it has one.
    """
    import torch

    context.device = torch.device(f"{kind}:{context.local_rank % gpus}" if gpus else "cpu")
    if bound is not None and bound.type == kind:
        context.device = bound
    if gpus:
        getattr(torch, kind).set_device(context.device)


def check_gpus(worker: Worker | None, gpus: int, *, process_group: bool | None) -> None:
    """Refuse a single srun task on a node with several GPUs: all but one would be idle.

    Args:
        worker: this process's rank assignment.
        gpus: number of GPUs that it sees.
        process_group: argument of `init`; False means that one process uses all GPUs on purpose.

    Raises:
        PlacementError: this process is such a task.
    """
    alone = (
        worker is not None
        and worker.topology.source == slurm_env.SOURCE
        and worker.topology.nproc_per_node is None
    )
    if alone and gpus > 1 and process_group is not False:
        raise PlacementError(
            f"srun started one process on this node, which sees {gpus} GPUs: "
            "all but one would be idle",
            f"run `srun ... clusterjob launch --nproc-per-node {gpus} SCRIPT`, "
            f"or srun with --ntasks-per-node={gpus}; "
            "set CLUSTERJOB_NPROC_PER_NODE=1 if one process is intended",
        )
