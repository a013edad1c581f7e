"""How many GPUs a process on this machine sees, without importing torch or a vendor's library."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from clusterjob.errors import UsageError

_NVIDIA = re.compile(r"nvidia[0-9]+\Z")
_DEVICES = "/dev"
_AMD_NODES = "/sys/class/kfd/kfd/topology/nodes"


def visible_gpus(environ: Mapping[str, str]) -> int:
    """Return how many GPUs a process with this environment sees; 0 where there is none, or no
    driver.

    NVIDIA's are device files, and containers are shown their own alone. AMD's are nodes of the
    kernel's topology with SIMD units.
    """
    nvidia = _nvidia()
    if nvidia:
        return len(listed_gpus(environ.get("CUDA_VISIBLE_DEVICES"), nvidia))
    amd = sum(_is_gpu(f"{_AMD_NODES}/{node}/properties") for node in _listed(_AMD_NODES))
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        amd = len(listed_gpus(environ.get(variable), amd))
    return amd


def listed_gpus(listed: str | None, installed: int) -> list[str]:
    """Return the GPUs that are both listed and there.

    As CUDA reads it, the list ends at the first entry that is no device.
    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".

    Args:
        listed: the value of CUDA_VISIBLE_DEVICES; None if it is not set, which means all.
        installed: how many GPUs the machine has.
    """
    if listed is None:
        return [str(index) for index in range(installed)]
    found: list[str] = []
    for entry in (part.strip() for part in listed.split(",")):
        is_index = (
            entry.isascii() and entry.isdigit() and len(entry) < 10 and int(entry) < installed
        )
        if not (is_index or (installed and entry.startswith(("GPU-", "MIG-")))) or entry in found:
            break
        found.append(entry)
    return found


def choose_gpus(wanted: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that workers are to have, as CUDA_VISIBLE_DEVICES names them, if this process
    may use them all.

    On a machine without a GPU, where the workers are rehearsed on the CPU, the variable alone says
    which ones may be named.

    Args:
        wanted: their numbers, as they are in CUDA_VISIBLE_DEVICES where that is set, or their
            UUIDs.
        environ: the environment that the workers inherit.

    Raises:
        UsageError: one is named twice, or is not visible here.
    """
    names = [name.strip() for name in wanted]
    if not all(names) or len(set(names)) != len(names):
        raise UsageError(
            f"{','.join(wanted)!r} is no list of GPUs: it has an empty or a double entry",
            "as in 0,1",
        )
    limit = environ.get("CUDA_VISIBLE_DEVICES")
    installed = _nvidia() or visible_gpus(environ)
    if limit is not None:
        visible = (
            listed_gpus(limit, installed)
            if installed
            else [name.strip() for name in limit.split(",")]
        )
        outside = [name for name in names if name not in visible]
        range_text = f"CUDA_VISIBLE_DEVICES={limit}"
    else:
        outside = [
            name
            for name in names
            if not name.startswith(("GPU-", "MIG-")) and not _is_number_below(name, installed)
        ]
        range_text = (
            f"this machine has {installed}" if installed else "it is neither a number nor a UUID"
        )
    if outside:
        raise UsageError(
            f"GPU {', '.join(outside)} is not to be had here: {range_text}",
            "name visible ones, or none for all of them",
        )
    return names


def _is_number_below(name: str, count: int) -> bool:
    return (
        name.isascii() and name.isdigit() and len(name) < 10 and (count == 0 or int(name) < count)
    )


def _nvidia() -> int:
    return sum(_NVIDIA.match(name) is not None for name in _listed(_DEVICES))


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _is_gpu(path: str) -> bool:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return re.search(r"^simd_count [1-9]", file.read(65536), re.MULTILINE) is not None
    except OSError:
        return False
