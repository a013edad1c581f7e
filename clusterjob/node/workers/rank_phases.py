"""Report the phases of a rank to its agent: import of torch, rendezvous, init, running.

`hook` applies `report_phases` in every Python process of a job that imports torch.distributed; in a
process that was not forked by the forkserver from a copy of this file. So this file imports no
other file of the package. `worker.group` calls `tell` for the rendezvous of ranks.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from typing import Any


def report_phases(module: Any) -> None:
    """Patch torch.distributed.distributed_c10d to report the phases of the default group."""
    initialize, rendezvous = module.init_process_group, module.rendezvous

    @functools.wraps(initialize)
    def init_process_group(*args: Any, **options: Any) -> Any:
        # With a store, the script or `worker.group` has made the rendezvous.
        tell("rendezvous" if options.get("store") is None else "init")
        group = initialize(*args, **options)
        tell("running")
        return group

    @functools.wraps(rendezvous)
    def reported_rendezvous(*args: Any, **options: Any) -> Iterator[Any]:
        for found in rendezvous(*args, **options):
            tell("init")
            yield found

    package = sys.modules.get("torch.distributed")
    if package is not None and package.__dict__.get("init_process_group") is initialize:
        package.init_process_group = init_process_group  # type: ignore[attr-defined]
    module.init_process_group, module.rendezvous = init_process_group, reported_rendezvous


def tell(phase: str) -> None:
    """Write the begin of a phase into the agents' report pipe; do nothing outside of a worker.

    Args:
        phase: a value of `clusterjob.node.logs.events.Phase`, or ``imported``.
    """
    # `forkserver_messages.WorkerPhase`
    send("WorkerPhase", phase=phase, monotonic=time.monotonic())


def send(kind: str, **fields: Any) -> None:
    """Write a message into the agents' report pipe; do nothing outside of a worker.

    Args:
        kind: the name of the message, see `clusterjob.node.workers.forkserver_messages`.
        **fields: its fields without the local rank.
    """
    with contextlib.suppress(OSError, ValueError, KeyError):
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))  # torchrun itself has none
        message = {"type": kind, "local_rank": local_rank, **fields}
        descriptor, opened = _report_pipe()
        try:
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                os.write(descriptor, json.dumps(message).encode() + b"\n")
        finally:
            if opened:
                os.close(descriptor)


def _report_pipe() -> tuple[int, bool]:
    """Return the descriptor of the report pipe, and whether this call has opened it.

    A worker has inherited it. The workers of a torchrun that the agent has started open that of
    their parent.

    Raises:
        OSError, ValueError: this process is no worker of an agent.
    """
    name, _, pid = os.environ.get("CLUSTERJOB_REPORT_FD", "").partition(":")
    if int(pid) == os.getpid():
        return int(name), False
    # Other launchers leave this variable unset: a child of a forked worker is no rank.
    if int(pid) != os.getppid() or "TORCHELASTIC_ERROR_FILE" not in os.environ:
        raise ValueError(pid)
    path = f"/proc/{int(pid)}/fd/{int(name)}"
    return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC), True
