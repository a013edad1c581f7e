"""Count the GPUs visible to a process, without importing torch or a vendor's library."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence

from clusterjob.errors import UsageError
from clusterjob.node.system import files

_NVIDIA = re.compile(r"nvidia[0-9]+\Z")
_COUNT = re.compile(r"[0-9]{1,4}")
# Ascend, TPU and Gaudi, Trainium, Cambricon, Moore Threads.
_OTHER = re.compile(r"(davinci|accel|hl|neuron|cambricon_dev|mtgpu\.)[0-9]*\Z")
_SIMD = re.compile(r"^simd_count [1-9]", re.MULTILINE)
_DEVICES = "/dev"
_AMD_NODES = "/sys/class/kfd/kfd/topology/nodes"


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)  # Linux has it
    return len(allowed(0)) if allowed is not None else os.cpu_count() or 1


def visible_gpus(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs that are visible to a process with this environment.

    The number is 0 without a GPU or a driver. For NVIDIA, device files are counted: a container has
    only those of its own GPUs. For AMD, nodes with SIMD units in the kernel's topology are counted.
    """
    nvidia = _nvidia()
    if nvidia:
        return len(listed_gpus(environ.get("CUDA_VISIBLE_DEVICES"), nvidia))
    properties = (
        files.read_text(f"{_AMD_NODES}/{node}/properties") for node in files.listed(_AMD_NODES)
    )
    amd = sum(_SIMD.search(text) is not None for text in properties)
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        amd = len(listed_gpus(environ.get(variable), amd))
    return amd


def has_other_accelerator() -> bool:
    """Return whether the machine has an accelerator that `visible_gpus` does not count."""
    return any(_OTHER.match(name) for name in files.listed(_DEVICES))


def cuda_devices(listed: str) -> list[str]:
    """Parse CUDA_VISIBLE_DEVICES: indices and UUIDs of GPUs (GPU-...) or MIG devices (MIG-...).

    As in CUDA, the list ends at the first entry that has neither form or occurs twice: ``0,-1,2``
    is one GPU.
    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    found: list[str] = []
    for entry in (part.strip() for part in listed.split(",")):
        is_index = entry.isascii() and entry.isdigit() and len(entry) < 10
        if not (is_index or entry.startswith(("GPU-", "MIG-"))) or entry in found:
            break
        found.append(entry)
    return found


def listed_gpus(listed: str | None, installed: int) -> list[str]:
    """Return the GPUs that are both listed and installed.

    The list ends at the first index that is not installed.

    Args:
        listed: the value of CUDA_VISIBLE_DEVICES; None if it is not set, which means all GPUs.
        installed: number of GPUs of the machine.
    """
    if listed is None:
        return [str(index) for index in range(installed)]
    entries = cuda_devices(listed) if installed else []
    return list(itertools.takewhile(lambda e: not e.isdigit() or int(e) < installed, entries))


def requested_gpus(text: str, environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs of ``launch --gpus``, for CUDA_VISIBLE_DEVICES.

    Args:
        text: a number of GPUs, or their indices or UUIDs: ``0,1``, ``device=5``.
        environ: the environment that the workers inherit.

    Raises:
        UsageError: there are fewer GPUs, or a GPU is not visible on this machine.
    """
    named = text.strip().strip('"').removeprefix("device=")
    if named != text.strip() or not _COUNT.fullmatch(named):
        return choose_gpus(named.split(","), environ)
    limit, installed = environ.get("CUDA_VISIBLE_DEVICES"), _nvidia() or visible_gpus(environ)
    if not installed and limit is None:
        return [str(index) for index in range(int(named))]  # a test on the CPU
    there = listed_gpus(limit, installed) if installed else cuda_devices(limit or "")
    if len(there) < int(named):
        raise UsageError(
            f"--gpus {named}: {len(there)} GPUs are visible here",
            f"--gpus device={named} chooses GPU {named}",
        )
    return there[: int(named)]


def choose_gpus(wanted: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Check the GPUs that the workers must use, and return them for CUDA_VISIBLE_DEVICES.

    On a machine without a GPU, workers run on the CPU for a test. Then the names are compared with
    CUDA_VISIBLE_DEVICES only.

    Args:
        wanted: indices or UUIDs of GPUs; each must be in CUDA_VISIBLE_DEVICES, if that is set.
        environ: the environment that the workers inherit.

    Raises:
        UsageError: an entry is empty, occurs twice, or is not visible on this machine.
    """
    names = [name.strip() for name in wanted]
    if not all(names) or len(set(names)) != len(names):
        raise UsageError(
            f"{','.join(wanted)!r} is not a list of GPUs: an entry is empty or occurs twice",
            "an example is 0,1",
        )
    limit, installed = environ.get("CUDA_VISIBLE_DEVICES"), _nvidia() or visible_gpus(environ)
    if limit is not None:
        visible = listed_gpus(limit, installed) if installed else cuda_devices(limit)
        outside = [name for name in names if name not in visible]
        range_text = f"CUDA_VISIBLE_DEVICES={limit}"
    elif installed:
        outside = [name for name in names if not listed_gpus(name, installed)]
        range_text = f"this machine has {installed}"
    else:
        outside = [name for name in names if not cuda_devices(name)]
        range_text = "it is neither a number nor a UUID"
    if outside:
        raise UsageError(
            f"GPU {', '.join(outside)} is not available here: {range_text}",
            "list visible GPUs, or none to use all of them",
        )
    return names


def _nvidia() -> int:
    return sum(_NVIDIA.match(name) is not None for name in files.listed(_DEVICES))
