"""Preload torch once per node, before the forkserver forks the workers.

`torchrun` imports torch in the launcher and again in every worker; clusterjob imports it once. For
a script that trains, it also imports torch._dynamo, which torch's optimizers import when they are
first used: it takes a second of every worker.

A fork is safe only in a process with one thread and no CUDA context. Otherwise the workers are
started by exec, and one output line gives the reason.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import re
import sys
import time
from importlib.machinery import SourceFileLoader
from typing import Any

from clusterjob.node.workers import early_variables, hook

_THREAD_ENDS = 0.2  # maximum seconds until /proc no longer lists a joined thread
# The initial seed in versions of torch with a constant one (c10::detail's default_rng_seed_val).
_TORCH_CONSTANT_SEED = 67280421310721


# A script with one of these words uses an optimizer; one with a variable that torch._dynamo reads
# while it is imported may set it before.
_TRAINS = re.compile(
    rb"\boptim\b|\.backward\(|Trainer\b|Accelerator\b|\blightning\b|torch\.compile"
)
_READ_BY_DYNAMO = re.compile(rb"TORCHDYNAMO_|TORCHINDUCTOR_|TORCH_COMPILE_")


def trains(source: bytes) -> bool:
    """Return whether a script probably imports torch._dynamo, which can be preloaded then."""
    return _TRAINS.search(source) is not None and _READ_BY_DYNAMO.search(source) is None


def preload_torch(*, training: bool = False) -> str | None:
    """Import torch and make this process ready to be forked.

    Args:
        training: whether to import what torch's optimizers import.

    Returns:
        None if workers can be forked, else the reason why they must be started by exec. An
        interpreter without torch can be forked too; less is preloaded then.
    """
    # A garbage collection would find nothing to free, and would unshare memory pages.
    gc.disable()
    hook.install()
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            return f"import torch failed: {error}"
    except Exception as error:
        # A broken installation can raise any exception; the worker shows the full error.
        return f"import torch failed: {error}"
    else:
        if torch.cuda.is_initialized():
            return "importing torch created a CUDA context"
        # Modules that bootstrap.init() needs besides torch: this saves some milliseconds per rank.
        from clusterjob import bootstrap  # noqa: F401
        from clusterjob.worker import group

        group.load_functional()
        if training:
            # The worker shows the error of a broken installation; torch 1 has no such module.
            with contextlib.suppress(Exception):
                import torch._dynamo
        if _fork_breaks_cuda(torch):
            return "importing torch called CUDA"
    threads = _count_threads_after_fork()
    if threads > 1:
        return f"{threads} threads run after the import of torch"
    gc.freeze()
    if _has_nanobind():
        # At the end of the interpreter, nanobind prints what the last collection has not freed.
        # Without it, the workers save half a second of that collection.
        atexit.register(gc.unfreeze)  # for the workers: this process ends without its handlers
    return None


def _has_nanobind() -> bool:
    """Return whether a module made with nanobind, such as triton, is loaded."""
    return any(
        type(value).__module__ == "nanobind"
        for module in list(sys.modules.values())
        if not isinstance(getattr(module, "__loader__", None), SourceFileLoader)
        for value in list(getattr(module, "__dict__", {}).values())
    )


def _fork_breaks_cuda(torch: Any) -> bool:
    """Return whether a forked worker cannot use CUDA, since this process has counted the GPUs."""
    broken = getattr(getattr(torch, "_C", None), "_cuda_isInBadFork", None)
    if broken is None:  # a torch for the CPU
        return False
    child = os.fork()
    if child == 0:
        os._exit(int(broken()))
    return os.waitpid(child, 0)[1] != 0


def has_torch() -> bool:
    """Return whether this interpreter can find torch, without importing it."""
    import importlib.util

    return importlib.util.find_spec("torch") is not None


def _count_threads_after_fork() -> int:
    """Return the number of threads in this process after a fork.

    OpenBLAS starts its thread pool when numpy is imported and stops it before every fork
    (pthread_atfork), so these threads are safe. A thread that is left after a fork is not safe.
    """
    if len(os.listdir("/proc/self/task")) > 1:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    deadline = time.monotonic() + _THREAD_ENDS
    while (count := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)  # /proc still lists a thread for a moment after pthread_join
    return count


class _WriteThrough(io.FileIO):
    """A file without a buffer; a signal during a long write loses nothing, as it does in FileIO."""

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        while view:
            view = view[super().write(view) or 0 :]
        return memoryview(data).nbytes


def refresh_after_fork() -> None:
    """Give a forked worker the state of a fresh process.

    This covers the garbage collector, random seeds, unbuffered output and the import of torch.
    """
    gc.enable()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        # Python's own `random` reseeds itself after a fork; numpy's global state does not.
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None and torch.initial_seed() != _TORCH_CONSTANT_SEED:
        # This version of torch draws its initial seed, which must differ in each process.
        torch.default_generator.seed()
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        # As `python -u`: the text before a crash is in the log. The same object, because modules of
        # the preload refer to it.
        raw = _WriteThrough(descriptor, "wb", closefd=False)
        raw.name = stream.name
        stream.__init__(  # type: ignore[misc]
            raw, encoding=stream.encoding, errors=stream.errors, newline="\n", write_through=True
        )
    early_variables.apply_at_import()
