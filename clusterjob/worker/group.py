"""Make a worker's process group, or adopt the script's own, and return its context."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from clusterjob.errors import RendezvousError, UsageError
from clusterjob.node.environments.reading import Finding
from clusterjob.node.environments.topology import Worker
from clusterjob.node.system import network, processes
from clusterjob.node.workers import rank_phases
from clusterjob.worker import ending, process, rank_assignment, rank_facts, rendezvous, siblings
from clusterjob.worker.context import Context
from clusterjob.worker.device import accelerators, check_gpus, choose_backend, choose_device
from clusterjob.worker.group_formation import GroupFormation
from clusterjob.worker.signed_values import SignedStore
from clusterjob.worker.store import await_joined, note_joined, open_store


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
    device = torch.device(choose_device(worker.local_rank if worker else 0, gpus, kind=kind))
    if gpus:
        getattr(torch, kind).set_device(device)
    context = _context_at(worker, finding.source, device=device)
    if process_group or (process_group is None and worker is not None):
        if not torch.distributed.is_available():
            raise UsageError(
                "this torch was built without torch.distributed: "
                "init(process_group=False) works without it"
            )
        try:
            nodes = _make_group(worker, backend, timeout=timeout, device=device)
        finally:
            ending.watch(context.local_rank)
        if nodes and finding.source in rank_assignment.NODES_UNKNOWN:
            context.node_rank, context.nnodes = nodes[context.rank], max(nodes) + 1
        context.join_group(owned=True)
    elif worker is not None:
        ending.watch(context.local_rank)
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
    import torch
    import torch.distributed as dist

    if process_group is False:
        raise UsageError(
            "init(process_group=False), but the script has initialised "
            "torch's default process group already"
        )
    kind, gpus = accelerators()
    worker: Any = finding.placement
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # A node's assignment has no rank, and the script may number the group's ranks in another order.
    if (getattr(worker, "rank", None), getattr(worker, "world_size", None)) == (rank, world_size):
        context = _context_at(
            worker,
            finding.source,
            device=torch.device(choose_device(worker.local_rank, gpus, kind=kind)),
        )
    else:
        context = _context_by_hosts(rank, world_size)
        context.device = torch.device(choose_device(context.local_rank, gpus, kind=kind))
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    if bound is not None and bound.type == kind:
        context.device = bound
    if gpus:
        getattr(torch, kind).set_device(context.device)
    context.join_group(owned=False)
    if backend is not None and backend != context.backend:
        raise UsageError(
            f"init(backend={backend!r}), but the script has initialised "
            f"the process group with {context.backend}"
        )
    ending.watch(context.local_rank)
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
) -> Sequence[int]:
    """Make the default process group.

    Returns:
        The index of each rank's machine; empty in a world of one without a launcher.
    """
    import torch.distributed as dist

    load_functional()
    options: dict[str, Any] = {"backend": backend}
    if timeout is not None:
        options["timeout"] = timedelta(seconds=timeout)
    if backend == "nccl":
        # With a device, torch makes the communicator in this call: errors appear now, and barriers
        # need not guess a device.
        options["device_id"] = device
    if worker is None:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **options)
        return ()
    hook = sys.excepthook
    seconds = timeout or rendezvous.DEFAULT_TIMEOUT
    topology = worker.topology
    rank_phases.tell("rendezvous")
    try:
        place = open_store(worker, options, timeout=seconds)
        signed = SignedStore(dist.PrefixStore("rendezvous", place.store), place.number)
        ask = process.ask_agents(worker.local_rank)
        nodes = rendezvous.join(
            signed,
            worker,
            own=rank_facts.own_facts(worker, device, backend=backend),
            timeout=seconds,
            started=place.served,
            ask=ask,
        )
        with GroupFormation(signed, worker, number=place.number, ask=ask):
            dist.init_process_group(
                store=place.store, rank=worker.rank, world_size=worker.world_size, **options
            )
        place.note_formed()
        # A rank that left now would break the connections of one that still forms the group.
        note_joined(place.store)
        ending.state.await_peers = partial(await_joined, place.store, worker.world_size)
    except RuntimeError as error:  # torch's DistError is a RuntimeError
        store_address = network.with_port(topology.master_addr, topology.master_port or 0)
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise RendezvousError(
            f"rank {worker.rank} of {worker.world_size} could not form the process group "
            f"({backend}, store at {store_address}): {reason}"
        ) from error
    finally:
        siblings.close()
    if ending.state.rounds:
        # For each group torch wraps the hook to add "[rank0]:". Keep only its first wrapper.
        sys.excepthook = hook
    ending.state.rounds += 1
    return nodes


def _context_at(worker: Worker | None, source: str, device: Any) -> Context:
    if worker is None:
        return Context(source=source, device=device, _leave=ending.leave)
    topology = worker.topology
    return Context(
        source=source,
        device=device,
        _leave=ending.leave,
        rank=worker.rank,
        local_rank=worker.local_rank,
        world_size=worker.world_size,
        local_world_size=worker.local_world_size,
        node_rank=topology.node_rank,
        nnodes=topology.nnodes,
        master_addr=topology.master_addr,
        master_port=topology.master_port,
    )


def _context_by_hosts(rank: int, world_size: int) -> Context:
    """Return the context of a group whose processes have ranks but no node ranks.

    The processes exchange their host names to compute local ranks and node ranks.
    """
    import torch
    import torch.distributed as dist

    own = f"{socket.gethostname()} {processes.boot_id()}"
    hosts: list[str] = [""] * world_size
    dist.all_gather_object(hosts, own)
    nodes = list(dict.fromkeys(hosts))
    return Context(
        source="process group",
        device=torch.device("cpu"),
        _leave=ending.leave,
        rank=rank,
        local_rank=hosts[:rank].count(own),
        world_size=world_size,
        local_world_size=hosts.count(own),
        node_rank=nodes.index(own),
        nnodes=len(nodes),
    )
