"""Write torch's flight recorder of a gloo group to a file when the agent asks for it.

`hook` loads a copy of this file into the workers. A thread waits for a byte in a pipe, so it also
answers while the main thread is in a collective: torch releases the interpreter's lock there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from typing import Any

_PIPE_FILE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_DUMP_FILE = "TORCH_FR_DUMP_TEMP_FILE"  # torch with this recorder for gloo has this name
_started: set[int] = set()  # pid of the process that has the thread


def watch(module: Any) -> None:
    """Patch torch.distributed.distributed_c10d to start the thread with the first gloo group."""
    form = module.init_process_group

    @functools.wraps(form)
    def init_process_group(*args: Any, **options: Any) -> Any:
        result = form(*args, **options)
        with contextlib.suppress(Exception):  # without a dump, the job runs as well
            _start(module)
        return result

    module.init_process_group = init_process_group
    package = sys.modules.get("torch.distributed")
    if package is not None and package.__dict__.get("init_process_group") is form:
        package.init_process_group = init_process_group  # type: ignore[attr-defined]


def _start(module: Any) -> None:
    from torch._C import _distributed_c10d as torch_c10d

    dump = getattr(torch_c10d, "_dump_fr_trace_json", None)
    pipe, target = os.environ.get(_PIPE_FILE), os.environ.get(_DUMP_FILE)
    if dump is None or not pipe or not target or os.getpid() in _started:
        return
    if "gloo" not in module.get_backend_config():
        return  # torch's own thread serves NCCL
    _started.add(os.getpid())
    rank = os.environ.get("RANK", str(module.get_rank()))
    path = pipe + rank + ".json.pipe"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    os.mkfifo(path, 0o600)
    # Open for writing too: the pipe then has no end of file.
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    threading.Thread(
        target=_serve,
        args=(descriptor, dump, target + rank + ".json"),
        name="clusterjob-dumps",
        daemon=True,
    ).start()


def _serve(descriptor: int, dump: Any, target: str) -> None:
    while os.read(descriptor, 64):
        data = dump()
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(target + ".part", flags, 0o600), "wb") as file:
                file.write(data)
            os.replace(target + ".part", target)
