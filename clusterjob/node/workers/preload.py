"""The warm start: import torch once per node, then fork the workers from that process.

`torchrun` imports torch in the launcher and again in every worker; here N ranks cost one import. A
fork is only as safe as the process is plain: one thread and no CUDA context. Where that does not
hold, the workers are started by exec, and one line says why.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from typing import NoReturn

from clusterjob.node.workers import early_variables, hook

_THREAD_ENDS = 0.2  # seconds; a thread that was joined is gone long before
# The seed of a fresh process in the versions of torch that have one for all (c10::detail's
# default_rng_seed_val).
_TORCH_CONSTANT_SEED = 67280421310721


def warm_up() -> str | None:
    """Import torch and make this process ready to be forked.

    Returns:
        None when workers may be forked, else the reason why they have to be started by exec. An
        interpreter without torch may be forked too: there is only less to be warmed.
    """
    # Objects of the import are not garbage, and a collection would unshare their pages.
    gc.disable()
    hook.install()
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            return f"import torch failed: {error}"
    except (
        Exception
    ) as error:  # a broken installation may raise anything; the worker itself will show it whole
        return f"import torch failed: {error}"
    else:
        if torch.cuda.is_initialized():
            return "importing torch created a CUDA context"
        # What bootstrap.init() needs beside torch: some milliseconds once, in the place of as many
        # for every rank of the node.
        from clusterjob import bootstrap  # noqa: F401
        from clusterjob.worker import group

        group.load_functional()
    threads = _threads_that_survive_a_fork()
    if threads > 1:
        return f"{threads} threads run after the import of torch"
    gc.freeze()
    return None


def has_torch() -> bool:
    """Return whether this interpreter can find torch, without importing it."""
    import importlib.util

    return importlib.util.find_spec("torch") is not None


def _threads_that_survive_a_fork() -> int:
    """Return how many threads this process has once fork handlers have run.

    OpenBLAS starts its pool when numpy is imported and takes it down before every fork
    (pthread_atfork): such threads are no danger. What is still there after a fork knows nothing of
    forks.
    """
    if len(os.listdir("/proc/self/task")) > 1:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    deadline = time.monotonic() + _THREAD_ENDS
    while (count := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)  # the kernel shows a thread a moment longer than pthread_join
    return count


def refresh_after_fork() -> None:
    """Undo, in a forked worker, what it shares with its siblings and would not share as a process
    of its own.
    """
    gc.enable()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        # Python's own `random` reseeds itself after a fork; numpy's global state does not.
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None and torch.initial_seed() != _TORCH_CONSTANT_SEED:
        # A torch that draws its first seed would have drawn another in each process.
        torch.default_generator.seed()
    for stream in (sys.stdout, sys.stderr):
        # So that followers see a line when it is written.
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    early_variables.apply_at_import()


def serve_store(host: str, port: int, listener_fd: int) -> NoReturn:
    """Serve torch's TCPStore on a socket that listens already, until killed.

    The socket was bound before anyone was told its port: no EADDRINUSE race, and early clients wait
    in its backlog.

    Args:
        host: the socket's address, as the clients are told it.
        port: its port.
        listener_fd: the socket; the store takes it over.
    """
    from torch.distributed import TCPStore

    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener_fd
    )
    while store is not None:
        signal.pause()
    raise AssertionError("unreachable")
