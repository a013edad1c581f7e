"""The GPUs of this machine as the submitting side sees them: how many there are, and how nodes that share it divide them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that jobs on this machine may use, as CUDA_VISIBLE_DEVICES would name them."""
    return listed_gpus(environ.get("CUDA_VISIBLE_DEVICES"), _installed())


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


def shares(available: list[str], nodes: int, per_node: int) -> list[list[str]] | None:
    """Return each node's GPUs when `nodes` nodes with `per_node` GPUs each are rehearsed on one machine; None if too few."""
    if len(available) < nodes * per_node:
        return None
    return [available[node * per_node : (node + 1) * per_node] for node in range(nodes)]


def _installed() -> int:
    if not Path("/proc/driver/nvidia").exists() and not Path("/dev/nvidiactl").exists() and not Path("/dev/dxg").exists():
        return 0  # no driver: spare the import
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
