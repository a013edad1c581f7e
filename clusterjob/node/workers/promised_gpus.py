"""Check that the workers of a node see the GPUs that the job was promised.

A job on another machine that sees fewer ends before its script starts: it would train on the CPU.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys

from clusterjob.node.system import devices, files

_TIMEOUT = 60.0  # seconds; a broken driver may block for ever


def missing(wanted: int, *, is_python: bool) -> str:
    """Return one line if this node's workers see fewer GPUs than promised; empty if they do not.

    Args:
        wanted: the number of GPUs that the job was promised on this node.
        is_python: whether this interpreter runs the workers; then torch counts the GPUs, if there
            is one, else the device files.
    """
    if not wanted or devices.has_other_accelerator():
        return ""
    answer = _ask_torch() if is_python else None
    if answer is None:
        seen, torch = devices.visible_gpus(os.environ), "torch not asked"
        who = "this node has"
    else:
        count, version, built_for = (*answer.split(" "), "")[:3]
        seen, torch, who = int(count), f"torch {version}", "torch sees"
        torch += f" for CUDA {built_for}" if built_for else " for the CPU"
    if seen >= wanted:
        return ""
    modules = ("/sys/module/nvidia/version", "/sys/module/amdgpu/version")
    driver = next(filter(None, (files.read_text(path).strip() for path in modules)), "none")
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    return (
        f"{who} {seen} of the {wanted} GPUs that the job was promised"
        f" ({torch}, driver {driver}, CUDA_VISIBLE_DEVICES {listed});"
        " --no-require-gpus (of `launch`: --require-gpus 0) runs it on the CPU"
    )


def _ask_torch() -> str | None:
    """Return ``COUNT VERSION CUDA`` of torch; None if torch cannot be asked.

    A forked child asks it: a process that has asked CUDA cannot fork workers that use it.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            import torch

            cuda, version = torch.cuda, torch.version
            # A process whose parent has asked CUDA cannot ask it again.
            if not getattr(torch._C, "_cuda_isInBadFork", bool)():
                count = cuda.device_count() if cuda.is_available() else 0
                built_for = version.cuda or getattr(version, "hip", None) or ""
                os.write(write_end, f"{count} {torch.__version__} {built_for}".encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answer:
        if select.select([answer], [], [], _TIMEOUT)[0]:
            os.waitpid(child, 0)
            return answer.read().decode().strip() or None
    os.kill(child, signal.SIGKILL)
    version = getattr(sys.modules.get("torch"), "__version__", "unknown")
    return f"0 {version} (no answer in {_TIMEOUT:g} s)"
