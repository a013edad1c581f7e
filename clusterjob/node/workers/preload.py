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
import itertools
import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clusterjob.node.system import devices, files, processes
from clusterjob.node.workers import hook

_THREAD_ENDS = 0.2  # maximum seconds until /proc no longer lists a joined thread
# A script with one of these words uses an optimizer.
_TRAINS = re.compile(
    rb"\boptim\b|\.backward\(|Trainer\b|Accelerator\b|\blightning\b|torch\.compile"
)
_CHANGES = re.compile(rb"environ|putenv")
# Variables that torch 2.13, torch._dynamo and the libraries they load read at import, but for those
# that they read later: as a string, or as an argument's name. An extra name costs time; a missing
# name breaks scripts.
_READ_BY_IMPORT = re.compile(
    rb"""(?:["']|[(,]\s*|^[ \t]*)(?!TORCH_(?:NCCL|FR|GLOO)_|TORCH_HOME\b|TORCH_EXTENSIONS_DIR\b"""
    rb"""|TORCH_CUDA_ARCH_LIST\b|KMP_DUPLICATE_LIB_OK\b)"""
    rb"""((?:OMP|GOMP|KMP|MKL|OPENBLAS|MKLDNN|DNNL|ONEDNN|NPY|KINETO|PYTORCH|TORCH|TORCHDYNAMO"""
    rb"""|TORCHINDUCTOR|TQDM)_[A-Z]\w*)(?:["']|\s*=)""",
    re.MULTILINE,
)
_IMPORT = re.compile(rb"(?:^|;)[ \t]*(?:from|import)\b([^;(#\n]*(?:\([^)]*\))?)", re.MULTILINE)
_MAX_FILES, _MAX_BYTES = 100, 1 << 20  # of a program that are read
_GPU_TIMEOUT = 60.0  # seconds; a broken driver may block for ever


def trains(source: bytes) -> bool:
    """Return whether a script probably imports torch._dynamo, which can be preloaded then."""
    return _TRAINS.search(source) is not None


def changed_variable(source: bytes, file: Path) -> str | None:
    """Return where a program may change a variable that the import of torch reads.

    A forked worker has inherited a torch that has read it. A program whose text has both the
    variable and ``environ`` may change it.

    Args:
        source: the main file's text.
        file: its path. The modules that it imports from its directory, or from the current one, are
            read too.

    Returns:
        A sentence with file, line and variable; None if no file has one.
    """
    texts, seen = [(file, source)], {file}
    for path, text in texts:  # it grows while it is read
        found = _READ_BY_IMPORT.search(text) if _CHANGES.search(text) else None
        if found is not None:
            line = text.count(b"\n", 0, found.start(1)) + 1
            return (
                f"{path.name} line {line} names {found[1].decode()},"
                " which torch reads while it is imported"
            )
        for directory, name in itertools.product((path.parent, file.parent, Path()), _names(text)):
            own = directory / name
            if own not in seen and len(seen) < _MAX_FILES and own.is_file():
                seen.add(own)
                with contextlib.suppress(OSError), own.open("rb") as stream:
                    texts.append((own, stream.read(_MAX_BYTES)))
    return None


def _names(text: bytes) -> Iterator[str]:
    """Yield the files of the modules that a text may import, and of other words."""
    for statement in _IMPORT.findall(text):
        first, *members = re.findall(r"[\w.]+", statement.decode(errors="replace")) or [""]
        for module in (first, *members, *(f"{first}.{member}" for member in members)):
            path = module.strip(".").replace(".", "/")
            yield from (f"{path}.py", f"{path}/__init__.py")


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
    hook.patch()
    if has_torch():
        try:
            import torch

            # Modules that bootstrap.init() needs: this saves some milliseconds per rank.
            from clusterjob import bootstrap  # noqa: F401
            from clusterjob.worker import group

            group.load_functional()
        except Exception as error:
            # A broken installation can raise any exception; the worker shows the full error.
            return f"import torch failed: {error}"
        if training:
            # The worker shows the error of a broken installation.
            with contextlib.suppress(Exception):
                import torch._dynamo  # noqa: F401
    if _fork_breaks_cuda():
        return "importing torch called CUDA"
    if (threads := _count_threads()) > 1:
        return f"{threads} threads run after the import of torch"
    gc.freeze()
    if "triton" in sys.modules:
        # At the end of the interpreter, nanobind prints what the last collection has not freed.
        # Without it, the workers save half a second of that collection.
        atexit.register(gc.unfreeze)  # for the workers: this process ends without its handlers
    return None


def has_torch() -> bool:
    """Return whether this interpreter can find torch, without importing it."""
    import importlib.util

    return importlib.util.find_spec("torch") is not None


def _fork_breaks_cuda() -> bool:
    """Return whether a forked worker cannot use CUDA, since this process has called it."""
    # A torch for the CPU has no such function.
    broken = getattr(getattr(sys.modules.get("torch"), "_C", None), "_cuda_isInBadFork", bool)
    return os.waitpid(processes.fork(broken), 0)[1] != 0


def _count_threads() -> int:
    """Return the number of threads in this process; it has forked just before.

    OpenBLAS starts its thread pool when numpy is imported and stops it before every fork
    (pthread_atfork), so these threads are safe. A thread that is left after a fork is not safe.
    """
    deadline = time.monotonic() + _THREAD_ENDS
    while (count := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)  # /proc still lists a thread for a moment after pthread_join
    return count


class _WriteThrough(io.FileIO):
    """A file without a buffer; unlike FileIO, a signal during a long write loses nothing."""

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        while left:
            left = left[super().write(left) or 0 :]
        return memoryview(data).nbytes


def refresh_after_fork() -> None:
    """Give a forked worker the state of a fresh process.

    This covers the garbage collector, random seeds and unbuffered output.
    """
    gc.enable()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        # Python's own `random` reseeds itself after a fork; numpy's global state does not.
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()  # torch draws it when it is imported
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        # As `python -u`: the text before a crash is in the log. The same object, because modules of
        # the preload refer to it.
        raw = _WriteThrough(descriptor, "wb", closefd=False)
        raw.name = stream.name
        stream.__init__(  # type: ignore[misc]
            raw, encoding=stream.encoding, errors=stream.errors, newline="\n", write_through=True
        )


def missing_gpus(wanted: int, *, is_python: bool) -> str:
    """Return one line if this node's workers see fewer GPUs than promised; empty if they do not.

    A job on another machine that sees fewer ends before its script starts: it would train on the
    CPU.

    Args:
        wanted: the number of GPUs that the job was promised on this node.
        is_python: whether this interpreter runs the workers; then torch counts the GPUs, if there
            is one, else the device files.
    """
    if not wanted or devices.has_other_accelerator():
        return ""
    who, answer = "torch sees", _ask_torch() if is_python else ""
    if not answer:
        who, answer = "this node has", f"{devices.visible_gpus(os.environ)} torch not asked"
    seen, _, torch = answer.partition(" ")
    if int(seen) >= wanted:
        return ""
    modules = ("/sys/module/nvidia/version", "/sys/module/amdgpu/version")
    driver = next(filter(None, (files.read_text(path).strip() for path in modules)), "none")
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    return (
        f"{who} {seen} of the {wanted} GPUs that the job was promised"
        f" ({torch}, driver {driver}, CUDA_VISIBLE_DEVICES {listed});"
        " --no-require-gpus (of `launch`: --require-gpus 0) runs it on the CPU"
    )


def _ask_torch() -> str:
    """Return the number of GPUs, a space and what torch it is; empty if torch cannot be asked.

    A forked child asks it: a process that has asked CUDA cannot fork workers that use it.
    """
    read_end, write_end = os.pipe()

    def ask() -> None:
        with contextlib.suppress(Exception):  # without torch, or a broken one
            import torch

            cuda, built_for = torch.cuda, torch.version.cuda or getattr(torch.version, "hip", None)
            # A process whose parent has asked CUDA cannot ask it again.
            if not getattr(torch._C, "_cuda_isInBadFork", bool)():
                count = cuda.device_count() if cuda.is_available() else 0
                kind = f"CUDA {built_for}" if built_for else "the CPU"
                os.write(write_end, f"{count} torch {torch.__version__} for {kind}".encode())

    child = processes.fork(ask)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answer:
        if select.select([answer], [], [], _GPU_TIMEOUT)[0]:
            os.waitpid(child, 0)
            return answer.read().decode()
    os.kill(child, signal.SIGKILL)  # not waitpid: the driver may keep even a killed process
    return f"0 torch has not answered in {_GPU_TIMEOUT:g} s"
