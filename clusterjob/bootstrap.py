"""The worker side: from whatever launched this process to a device, a process group and a `Context`.

    from clusterjob import bootstrap

    with bootstrap.init() as ctx:
        model = ctx.wrap(Net())

The same lines run under clusterjob, under torchrun, in a platform's own processes and as plain ``python train.py``.
Importing this module imports no torch.
"""

from __future__ import annotations

import atexit
import os
import sys

from clusterjob.errors import GangError, PlaceError, UsageError

# Not typing's: importing that costs as much as the rest of this module. Type checkers take the name for theirs.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any

    from clusterjob.node.environments import Finding
    from clusterjob.node.topology import Worker
    from clusterjob.worker.context import Context
    from clusterjob.worker.rollcall import Roll

__all__ = ["init", "shutdown"]

BACKENDS = ("nccl", "gloo")


class _Process:
    """What this module remembers of the process that it runs in."""

    def __init__(self) -> None:
        self.context: Context | None = None
        self.timeout: float | None = None
        self.rounds = 0  # process groups that were made here
        self.pid = 0  # of the process that called init: a forked child inherits the rest, and none of it is its own
        self.watched = False  # whether the ends of this process are looked after
        self.hosted: tuple[Any, int] | None = None  # rank 0's: a store that it serves itself, and for how many processes
        self.abandoned = False  # whether threads of a group that was left in the middle still run


_process = _Process()


def init(
    backend: str | None = None,
    *,
    process_group: bool | None = None,
    timeout: float | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> Context:
    """Find this process's place, choose its device, and make the process group; every process of the job calls it.

    The place comes from the environment: torch's own variables, which clusterjob and torchrun set, or a platform's. Without
    any, as in plain ``python train.py``, this is a world of one. A process group that the script has made itself is adopted
    and left alone at the end. A second call returns the context of the first.

    On a machine with GPUs the device is ``cuda:(local_rank % visible GPUs)``, on Intel's ``xpu:...``: a launcher that shows each
    process just one GPU makes that one cuda:0 for all of them.

    Args:
        backend: ``nccl`` or ``gloo``; by default nccl where torch sees a GPU, gloo elsewhere.
        process_group: whether to make one; by default in every launched process, a world of one included, and not in a plain
            one. A group asked for in a plain process uses no store that listens on a port.
        timeout: seconds after which a collective, or the meeting of all processes, fails; torch's own default (10 minutes
            for nccl, 30 for gloo) if None.
        rank: this process's place by hand, for a launcher that clusterjob does not know; needs world_size. Whatever is not
            given beside the two comes from torch's own variables (LOCAL_RANK, MASTER_ADDR, MASTER_PORT and so on). Processes
            of multiprocessing, torch's included, need no more than the two where all are of one machine and one parent.
        world_size: number of processes in the job, by hand; needs rank.
        local_rank: index of this process on its node, by hand.
        local_world_size: number of processes on this node, by hand.
        master_addr: host name or address of rank 0's node, by hand.
        master_port: TCP port on which rank 0 serves torch's store, by hand.

    Returns:
        The context; `shutdown`, the end of its with block or of the process leaves the group.

    Raises:
        PlaceError: the environment is half-set or contradictory (the message names the variables), or it gives a node's place
            and not a process's, so that a launcher is needed.
        GangError: the processes did not find each other.
        UsageError: the arguments make no sense together, or do not agree with the context that exists already.
    """
    if backend is not None and backend not in BACKENDS:
        raise UsageError(f"there is no backend {backend!r}: it is one of {', '.join(BACKENDS)}")
    if timeout is not None and not timeout > 0:
        raise UsageError(f"timeout is {timeout}: it is a number of seconds above 0")
    by_hand = {
        "rank": rank, "world_size": world_size, "local_rank": local_rank, "local_world_size": local_world_size,
        "master_addr": master_addr, "master_port": master_port,
    }  # fmt: skip
    known = _process.context
    if known is not None and (known.backend is None or known.holds_group()):
        _check_same(known, {"backend": backend, "process_group": process_group, "timeout": timeout} | by_hand)
        return known
    shutdown()  # of a context whose group the script has destroyed itself
    from clusterjob.worker import own_place

    if report_pipe() is not None:  # a forked worker has offered it before
        from clusterjob.node import stacks

        stacks.offer()

    finding = own_place.find(
        {name.upper(): str(value) for name, value in by_hand.items() if value is not None}, checked=not _group_exists(), timeout=timeout
    )
    own_place.prepare(finding)

    import torch.distributed as dist

    _process.pid = os.getpid()
    _process.timeout = timeout
    if dist.is_available() and dist.is_initialized():
        context = _adopt(finding, backend, process_group=process_group)
    else:
        context = _make(finding, backend, timeout, process_group=process_group)
    _process.context = context
    return context


def shutdown() -> None:
    """Leave the process group that `init` made and forget the context; the context is of no use afterwards.

    Waits for collectives of this process that are still under way, and for no other process. Harmless when there is nothing
    to leave, and when it is called twice. A group that the script made itself stays.
    """
    _leave(failed=False)


def _group_exists() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and bool(distributed.is_initialized())


def _check_same(known: Context, asked: dict[str, Any]) -> None:
    """Refuse a second call that asks for something else than the first one gave."""
    given = {"process_group": known.backend is not None, "timeout": _process.timeout}
    for name, value in asked.items():
        has = given[name] if name in given else getattr(known, name)
        if value is not None and value != has:
            raise UsageError(f"init was called before, with {name}={has!r}: it cannot become {value!r} before shutdown()")


# -- the device and the group --------------------------------------------------------------------------------------------


def choose_backend(asked: str | None, gpus: int, kind: str = "cuda") -> str:
    """Return the backend for a machine.

    Args:
        asked: what the script wants; None for the default.
        gpus: GPUs that torch sees and can use.
        kind: torch's name for them: ``cuda``, which AMD's are called too, or ``xpu``.

    Raises:
        UsageError: nccl without a GPU.
    """
    if asked == "nccl" and not (gpus and kind == "cuda"):
        raise UsageError("the backend nccl needs a GPU, and torch sees none (torch.cuda.is_available() is False)")
    return asked or ("nccl" if gpus and kind == "cuda" else "gloo")


def choose_device(local_rank: int, gpus: int, kind: str = "cuda") -> str:
    """Return the name of a process's device: cpu, or the GPU of its local rank among those that it sees.

    Args:
        local_rank: index of the process on its node.
        gpus: GPUs that torch sees and can use. One, where the launcher shows each process only its own (mace#435).
        kind: torch's name for them.
    """
    return f"{kind}:{local_rank % gpus}" if gpus else "cpu"


def _accelerators() -> tuple[str, int]:
    """Return torch's name for this machine's GPUs, and how many it sees and can use. ROCm's are cuda to torch."""
    import torch

    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return kind, int(module.device_count())
    return "cuda", 0


def _make(finding: Finding, backend: str | None, timeout: float | None, *, process_group: bool | None) -> Context:
    """Return a context of our own making, with a process group where there should be one."""
    import torch

    from clusterjob.worker import own_place

    worker: Any = finding.place
    kind, gpus = _accelerators()
    own_place.check_gpus(worker, gpus, process_group=process_group)
    backend = choose_backend(backend, gpus, kind)
    device = torch.device(choose_device(worker.local_rank if worker else 0, gpus, kind))
    if gpus:
        getattr(torch, kind).set_device(device)
    context = _context_at(worker, finding.source, device)
    if process_group or (process_group is None and worker is not None):
        if not torch.distributed.is_available():
            raise UsageError("this torch was built without torch.distributed: init(process_group=False) does without")
        try:
            roll = _make_group(worker, backend, timeout, device)
        finally:
            _watch_the_end(context.local_rank)
        if roll is not None and finding.source in own_place.NODES_UNKNOWN:
            context.node_rank, context.nnodes = roll.nodes[context.rank], max(roll.nodes) + 1
        context.join_group(owned=True)
    elif worker is not None:
        _watch_the_end(context.local_rank)
    return context


def _context_at(worker: Worker | None, source: str, device: Any) -> Context:
    from clusterjob.worker.context import Context

    topology = worker.topology if worker else None
    return Context(
        rank=worker.rank if worker else 0,
        local_rank=worker.local_rank if worker else 0,
        world_size=worker.world_size if worker else 1,
        local_world_size=worker.local_world_size if worker else 1,
        node_rank=topology.node_rank if topology else 0,
        nnodes=topology.nnodes if topology else 1,
        master_addr=topology.master_addr if topology else None,
        master_port=topology.master_port if topology else None,
        source=source,
        device=device,
        leave=lambda failed: _leave(failed=failed),
    )


def _make_group(worker: Worker | None, backend: str, timeout: float | None, device: Any) -> Roll | None:
    """Make the default process group; returns what the roll-call has found, None in a world of one without a launcher."""
    from datetime import timedelta

    import torch.distributed as dist

    load_functional()
    options: dict[str, Any] = {"backend": backend}
    if timeout is not None:
        options["timeout"] = timedelta(seconds=timeout)
    if backend == "nccl":
        # Bound to its device the communicator forms at once, errors show here, and no barrier has to guess.
        options["device_id"] = device
    if worker is None:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **options)
        return None
    from clusterjob.worker import rollcall, siblings

    where = rollcall.where(worker.topology.master_addr, worker.topology.master_port or 0)
    hook = sys.excepthook
    patience = timeout or rollcall.DEFAULT_TIMEOUT
    try:
        store, started = _meeting_store(worker, options, patience)
        roll = rollcall.call(
            dist.PrefixStore("roll", store), worker, rollcall.own_facts(worker, device, backend), patience,
            started=started, ask=_ask_agents(worker.local_rank),
        )  # fmt: skip
        dist.init_process_group(store=store, rank=worker.rank, world_size=worker.world_size, **options)
        if not started:
            rollcall.note_joined(store)
            if worker.rank == 0:
                _process.hosted = store, worker.world_size
    except RuntimeError as error:  # torch's DistError is one
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise GangError(
            f"rank {worker.rank} of {worker.world_size} could not form the process group ({backend}, store at {where}): {reason}"
        ) from error
    finally:
        siblings.part()
    if _process.rounds:
        sys.excepthook = hook  # torch has put its "[rank0]:" around it, which the first time is inside it already
    _process.rounds += 1
    return roll


def load_functional() -> None:
    """Import torch.distributed.nn.functional while there is no process group, where this torch has it.

    Functions of that module take the default group of the moment of its import for a default argument. Imported later, as by
    the first optimizer, it keeps the group for ever: gloo's threads outlive destroy_process_group(), and now and then abort
    the process when the interpreter ends (pytorch#179291).
    """
    import torch.distributed as dist

    if dist.is_available():
        import torch.distributed.nn.functional  # noqa: F401


def _ask_agents(local_rank: int) -> Callable[..., None]:
    """Return how our agents are asked after missing ranks; other launchers hear nothing."""
    descriptor = report_pipe()

    def ask(missing: list[int], *, final: bool) -> None:
        if descriptor is not None and missing:
            from clusterjob.node import report

            report.ask(descriptor, local_rank, missing, final=final)

    return ask


def _meeting_store(worker: Worker, options: dict[str, Any], patience: float) -> tuple[Any, bool]:
    """Return the store over which the processes tell each other their addresses, and whether a launcher's agents serve it."""
    import torch.distributed as dist

    from clusterjob.worker import rollcall

    address, port = worker.topology.master_addr, worker.topology.master_port
    if port is None:
        raise PlaceError(f"the environment ({worker.topology.source}) names no port on which rank 0 could be met: set MASTER_PORT")
    at_master = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")) == (address, str(port))
    served = at_master and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if served:
        wait = {"timeout": options["timeout"]} if "timeout" in options else {}
        store = next(dist.rendezvous("env://", worker.rank, worker.world_size, **wait))[0]
    else:
        store = rollcall.open_store(worker, patience)
    # A launcher's store outlives a group, whose addresses it still holds under the very keys of the next one: torch would
    # connect to them. So every group has a corner of its own.
    return dist.PrefixStore(f"clusterjob/{_process.rounds}", store), served


def _adopt(finding: Finding, backend: str | None, *, process_group: bool | None) -> Context:
    """Return a context around the process group that the script has made itself."""
    import torch
    import torch.distributed as dist

    if process_group is False:
        raise UsageError("init(process_group=False), but the script has initialised torch's default process group already")
    kind, gpus = _accelerators()
    worker: Any = finding.place
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Only a process's own place has a rank; the script may also have given the group another order than the launcher.
    if (getattr(worker, "rank", None), getattr(worker, "world_size", None)) == (rank, world_size):
        context = _context_at(worker, finding.source, torch.device(choose_device(worker.local_rank, gpus, kind)))
    else:
        context = _context_by_hosts(rank, world_size)
        context.device = torch.device(choose_device(context.local_rank, gpus, kind))
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    if bound is not None and bound.type == kind:
        context.device = bound
    if gpus:
        getattr(torch, kind).set_device(context.device)
    context.join_group(owned=False)
    if backend is not None and backend != context.backend:
        raise UsageError(f"init(backend={backend!r}), but the script has initialised the process group with {context.backend}")
    _watch_the_end(context.local_rank)
    return context


def _context_by_hosts(rank: int, world_size: int) -> Context:
    """Return the context of a group whose processes know their ranks alone: they tell each other where they run."""
    import socket

    import torch
    import torch.distributed as dist

    from clusterjob.node import processes

    own = f"{socket.gethostname()} {processes.boot_id()}"
    hosts: list[str] = [""] * world_size
    dist.all_gather_object(hosts, own)
    nodes = list(dict.fromkeys(hosts))
    context = _context_at(None, "process group", torch.device("cpu"))
    context.rank, context.world_size = rank, world_size
    context.local_rank, context.local_world_size = hosts[:rank].count(own), hosts.count(own)
    context.node_rank, context.nnodes = nodes.index(own), len(nodes)
    return context


# -- the end -------------------------------------------------------------------------------------------------------------


def _leave(*, failed: bool) -> None:
    context, _process.context = _process.context, None
    hosted, _process.hosted = _process.hosted, None
    if context is not None and os.getpid() == _process.pid:
        if hosted is not None and not failed:
            from clusterjob.worker import rollcall

            rollcall.await_joined(*hosted)
        _process.abandoned |= context.close(failed=failed)


def _watch_the_end(local_rank: int) -> None:
    """Have the group left at the end of the process, and an uncaught exception reported the moment it happens. Once is enough.

    Args:
        local_rank: the worker that the launcher is told of.
    """
    if _process.watched:
        return
    _process.watched = True
    atexit.register(_leave, failed=False)
    previous = sys.excepthook
    report_fd = report_pipe()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        import threading

        own = os.getpid() == _process.pid and threading.current_thread() is threading.main_thread()
        if own and report_fd is not None:
            from clusterjob.node import program, report

            report.report(report_fd, local_rank, program.summary(error), 130 if kind is KeyboardInterrupt else 1)
        previous(kind, error, trace)
        if own and not _interactive():
            _leave(failed=True)
            if _process.abandoned and kind is not KeyboardInterrupt:  # that one ends by its signal
                end_process(1)

    sys.excepthook = hook


def report_pipe() -> int | None:
    """Return the descriptor on which our agent hears of failures; None under other launchers, and in a worker's children."""
    import stat

    from clusterjob.node import contract, program, report  # noqa: F401 - so that the hook, in a process in trouble, finds them loaded

    descriptor, _, pid = os.environ.get(contract.REPORT_FD, "").partition(":")
    try:
        # A child inherits the variable, and under this number perhaps a file of its own.
        if pid != str(os.getpid()) or not stat.S_ISFIFO(os.fstat(int(descriptor)).st_mode):
            return None
        os.set_inheritable(int(descriptor), False)
    except (ValueError, OSError):
        return None
    return int(descriptor)


def _interactive() -> bool:
    return bool(sys.flags.interactive) or hasattr(sys, "ps1")


def end_process(exit_code: int) -> None:
    """End as the interpreter would, but for the taking apart of its modules.

    Threads of an abandoned group still hold tensors. One that lets go of a tensor while the interpreter is being taken apart
    brings the process down by SIGABRT ("terminate called without an active exception"), which then hides the failure itself
    (pytorch#179291; with torch 2.13 in 1 of 15 runs).
    """
    import ctypes
    import threading

    try:
        getattr(threading, "_shutdown", lambda: None)()  # waits for the threads that are no daemons
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        ctypes.CDLL(None).fflush(None)  # what C libraries have printed, such as NCCL's log
    finally:
        os._exit(exit_code)
