"""How many GPUs a process on this machine sees, without importing torch or a vendor's library."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_NVIDIA = re.compile(r"nvidia[0-9]+\Z")
_DEVICES = "/dev"
_AMD_NODES = "/sys/class/kfd/kfd/topology/nodes"


def visible_gpus(environ: Mapping[str, str]) -> int:
    """Return how many GPUs a process with this environment sees; 0 where there is none, or no driver.

    NVIDIA's are device files, and containers are shown their own alone. AMD's are nodes of the kernel's topology with SIMD units.
    """
    nvidia = sum(_NVIDIA.match(name) is not None for name in _listed(_DEVICES))
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
        is_index = entry.isascii() and entry.isdigit() and len(entry) < 10 and int(entry) < installed
        if not (is_index or (installed and entry.startswith(("GPU-", "MIG-")))) or entry in found:
            break
        found.append(entry)
    return found


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
