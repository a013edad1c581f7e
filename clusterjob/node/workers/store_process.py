"""Start the process that serves torch's store on node 0."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from clusterjob.node.contract import World
from clusterjob.node.system import processes

NO_TORCH = 3  # exit code of a store process that could not import torch


def start(world: World, listener: int, log: Path, close: Sequence[int]) -> int:
    """Fork a process that serves torch's store until it is killed; return its pid.

    Args:
        world: the round whose workers use the store.
        listener: the descriptor of the listening socket; it is closed in this process.
        log: the file for the process's output.
        close: descriptors of this process that the new one must not keep.
    """
    forkserver_pid = os.getpid()
    log_end = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    pid = os.fork()
    if pid != 0:
        os.close(listener)
        os.close(log_end)
        return pid
    try:
        processes.die_with_parent(forkserver_pid)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in close:
            os.close(descriptor)
        os.dup2(log_end, 1)
        os.dup2(log_end, 2)
        os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
        processes.raise_open_files()
        from torch.distributed import TCPStore

        # The socket was bound before any client got its port. So there is no EADDRINUSE race, and
        # early clients wait in the backlog. The store takes ownership of the descriptor.
        store = TCPStore(
            world.master_addr,
            world.master_port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        while store is not None:
            signal.pause()
    except ImportError as error:
        # torch is broken; a worker that imports it shows the full error.
        os.write(2, f"cannot start torch's store: {error!r}\n".encode())
        os._exit(NO_TORCH)
    except BaseException as error:
        os.write(2, f"the store process failed: {error!r}\n".encode())
    os._exit(1)
