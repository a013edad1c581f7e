"""The worker side: from whatever launched this process to a device, a process group and a
`Context`.

    from clusterjob import bootstrap

    with bootstrap.init() as ctx:
        model = ctx.wrap(Net())

The same lines run under clusterjob, under torchrun, in a platform's own processes and as plain
``python train.py``. Importing this module imports no torch.
"""

from __future__ import annotations

import os
import sys

from clusterjob.errors import UsageError

# Not typing's: importing that costs as much as the rest of this module. Type checkers take the name
# for theirs.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from clusterjob.worker.context import Context

__all__ = ["init", "shutdown"]


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
    """Find this process's place, choose its device, and make the process group; every process of
    the job calls it.

    The place comes from the environment: torch's own variables, which clusterjob and torchrun set,
    or a platform's. Without any, as in plain ``python train.py``, this is a world of one. A process
    group that the script has made itself is adopted and left alone at the end. A second call
    returns the context of the first.

    On a machine with GPUs the device is ``cuda:(local_rank % visible GPUs)``, on Intel's
    ``xpu:...``: a launcher that shows each process just one GPU makes that one cuda:0 for all of
    them.

    Args:
        backend: ``nccl`` or ``gloo``; by default nccl where torch sees a GPU, gloo elsewhere.
        process_group: whether to make one; by default in every launched process, a world of one
            included, and not in a plain one. A group asked for in a plain process uses no store
            that listens on a port.
        timeout: seconds after which a collective, or the meeting of all processes, fails; torch's
            own default (10 minutes for nccl, 30 for gloo) if None.
        rank: this process's place by hand, for a launcher that clusterjob does not know; needs
            world_size. Whatever is not given beside the two comes from torch's own variables
            (LOCAL_RANK, MASTER_ADDR, MASTER_PORT and so on). Processes of multiprocessing, torch's
            included, need no more than the two where all are of one machine and one parent.
        world_size: number of processes in the job, by hand; needs rank.
        local_rank: index of this process on its node, by hand.
        local_world_size: number of processes on this node, by hand.
        master_addr: host name or address of rank 0's node, by hand.
        master_port: TCP port on which rank 0 serves torch's store, by hand.

    Returns:
        The context; `shutdown`, the end of its with block or of the process leaves the group.

    Raises:
        PlaceError: the environment is half-set or contradictory (the message names the variables),
            or it gives a node's place and not a process's, so that a launcher is needed.
        GangError: the processes did not find each other.
        UsageError: the arguments make no sense together, or do not agree with the context that
            exists already.
    """
    from clusterjob.worker import device, ending, group, process, rank_assignment

    if backend is not None and backend not in device.BACKENDS:
        raise UsageError(
            f"there is no backend {backend!r}: it is one of {', '.join(device.BACKENDS)}"
        )
    if timeout is not None and not timeout > 0:
        raise UsageError(f"timeout is {timeout}: it is a number of seconds above 0")
    by_hand = {
        "rank": rank, "world_size": world_size, "local_rank": local_rank,
        "local_world_size": local_world_size, "master_addr": master_addr,
        "master_port": master_port,
    }  # fmt: skip
    known = ending.remembered.context
    if known is not None and (known.backend is None or known.holds_group()):
        _check_same(
            known,
            ending.remembered.timeout,
            asked={"backend": backend, "process_group": process_group, "timeout": timeout}
            | by_hand,
        )
        return known
    shutdown()  # of a context whose group the script has destroyed itself
    if process.report_pipe() is not None:  # a forked worker has offered it before
        from clusterjob.node.workers import stacks

        stacks.offer()

    finding = rank_assignment.find(
        {name.upper(): str(value) for name, value in by_hand.items() if value is not None},
        checked=not _group_exists(),
        timeout=timeout,
    )
    rank_assignment.prepare(finding)

    import torch.distributed as dist

    ending.remembered.pid = os.getpid()
    ending.remembered.timeout = timeout
    if dist.is_available() and dist.is_initialized():
        context = group.adopt(finding, backend, process_group=process_group)
    else:
        context = group.make(finding, backend, timeout=timeout, process_group=process_group)
    ending.remembered.context = context
    return context


def shutdown() -> None:
    """Leave the process group that `init` made and forget the context; the context is of no use
    afterwards.

    Waits for collectives of this process that are still under way, and for no other process.
    Harmless when there is nothing to leave, and when it is called twice. A group that the script
    made itself stays.
    """
    from clusterjob.worker import ending

    ending.leave(failed=False)


def _group_exists() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return (
        distributed is not None
        and distributed.is_available()
        and bool(distributed.is_initialized())
    )


def _check_same(known: Context, timeout: float | None, asked: dict[str, Any]) -> None:
    """Refuse a second call that asks for something else than the first one gave."""
    given = {"process_group": known.backend is not None, "timeout": timeout}
    for name, value in asked.items():
        has = given[name] if name in given else getattr(known, name)
        if value is not None and value != has:
            raise UsageError(
                f"init was called before, with {name}={has!r}: it cannot become {value!r} before shutdown()"
            )
