"""Count the GPUs of this machine, and divide them among nodes that share it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from clusterjob.node.system.devices import listed_gpus

__all__ = ["listed_gpus", "shares", "visible_gpus"]


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that jobs on this machine may use, in CUDA_VISIBLE_DEVICES format."""
    return listed_gpus(environ.get("CUDA_VISIBLE_DEVICES"), _installed())


def shares(available: list[str], nodes: int, per_node: int) -> list[list[str]] | None:
    """Divide this machine's GPUs among nodes; return None if there are too few.

    Args:
        available: the GPUs of this machine.
        nodes: number of nodes.
        per_node: GPUs per node.
    """
    if len(available) < nodes * per_node:
        return None
    return [available[node * per_node : (node + 1) * per_node] for node in range(nodes)]


def _installed() -> int:
    if (
        not Path("/proc/driver/nvidia").exists()
        and not Path("/dev/nvidiactl").exists()
        and not Path("/dev/dxg").exists()
    ):
        return 0  # no driver, so the slow import is not needed
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
