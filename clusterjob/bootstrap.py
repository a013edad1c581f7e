"""Set up a worker process: rank assignment, device, process group and `Context`.

    from clusterjob import bootstrap

    with bootstrap.init() as ctx:
        model = ctx.wrap(Net())

The same lines run under clusterjob, under torchrun, in a platform's own processes and as plain
``python train.py``. Importing this module does not import torch.
"""

from __future__ import annotations

import sys

from clusterjob.errors import UsageError

# `import typing` takes as long as the rest of this module. Type checkers accept any variable
# of this name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from clusterjob.worker.context import Context

__all__ = ["init", "shutdown"]

_BACKENDS = ("nccl", "gloo")


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
    """Get this process's rank, choose its device, and make the process group.

    Every process of the job calls `init`. It reads the rank assignment from torch's variables,
    which clusterjob and torchrun set, or from a platform's variables. Without any of them, as in
    plain ``python train.py``, the world size is 1. If the script has made a process group itself,
    `init` uses that group, and `shutdown` does not destroy it. A second call returns the same
    context.

    On a machine with GPUs, the device is ``cuda:(local_rank % visible GPUs)``; with Intel GPUs, it
    is ``xpu:...``. If a launcher shows each process only one GPU, that GPU is cuda:0 in every
    process.

    Args:
        backend: ``nccl`` or ``gloo``; by default nccl if torch sees a GPU, else gloo.
        process_group: whether to make a process group. By default, a launched process makes one,
            also if the world size is 1; a plain process makes none. A group in a plain process
            opens no port.
        timeout: seconds after which a collective, or the rendezvous of all ranks, fails; None for
            torch's default (10 minutes for nccl, 30 for gloo).
        rank: rank of this process, for a launcher that clusterjob does not know; needs world_size.
            The other values are then read from torch's variables, such as MASTER_ADDR. Processes
            of multiprocessing or torch.multiprocessing need only rank and world_size if they all
            run on one machine and have the same parent.
        world_size: number of processes in the job; needs rank.
        local_rank: index of this process on its node. This argument and the following ones need
            rank and world_size.
        local_world_size: number of processes on this node.
        master_addr: host name or address of rank 0's node.
        master_port: TCP port on which rank 0 serves torch's store.

    Returns:
        The context. The process leaves the group at `shutdown`, at the end of the context's with
        block, or when it ends.

    Raises:
        PlacementError: the variables are incomplete or contradictory (the message names them), or
            they give only the node's rank, so that a launcher has to start the processes.
        RendezvousError: the processes did not find each other.
        UsageError: the arguments exclude each other, or differ from those of the first call.
    """
    from clusterjob.worker import group
    from clusterjob.worker.context import state

    if backend is not None and backend not in _BACKENDS:
        raise UsageError(f"unknown backend {backend!r}: must be one of {', '.join(_BACKENDS)}")
    if timeout is not None and not timeout > 0:
        raise UsageError(f"timeout {timeout}: must be a number of seconds above 0")
    given = {
        "rank": rank, "world_size": world_size, "local_rank": local_rank,
        "local_world_size": local_world_size, "master_addr": master_addr,
        "master_port": master_port,
    }  # fmt: skip
    known = state.context
    if known is not None and (known.backend is None or known.holds_group()):
        _check_same(
            known,
            state.timeout,
            asked={"backend": backend, "process_group": process_group, "timeout": timeout} | given,
        )
        return known
    shutdown()  # closes a context whose group the script has destroyed itself
    finding = group.find_rank(
        {name.upper(): str(value) for name, value in given.items() if value is not None},
        checked=not _group_exists(),
    )
    group.prepare(finding)

    import torch.distributed as dist  # not earlier: torch reads variables that `prepare` sets

    state.timeout = timeout
    if dist.is_available() and dist.is_initialized():
        context = group.adopt(finding, backend, process_group=process_group)
    else:
        context = group.make(finding, backend, timeout=timeout, process_group=process_group)
    state.context = context
    return context


def shutdown() -> None:
    """Leave the process group that `init` made and close the context.

    It waits for running collectives of this process, but not for other processes. Without a
    context, it does nothing. It does not destroy a group that the script made itself.
    """
    from clusterjob.worker.context import leave

    leave(failed=False)


def _group_exists() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return (
        distributed is not None
        and distributed.is_available()
        and bool(distributed.is_initialized())
    )


def _check_same(known: Context, timeout: float | None, asked: dict[str, Any]) -> None:
    """Refuse a second call of `init` with other arguments than the first one."""
    given = {"process_group": known.backend is not None, "timeout": timeout}
    for name, value in asked.items():
        has = given[name] if name in given else getattr(known, name)
        if value is not None and value != has:
            raise UsageError(
                f"init was called before, with {name}={has!r}: "
                f"it cannot become {value!r} before shutdown()"
            )
