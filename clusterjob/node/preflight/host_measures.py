"""Measure one node alone: matrix multiply, memory, disk, GPUs; and read its versions."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusterjob.node.preflight.measures import Probe
from clusterjob.node.system import devices, files

_MATRIX = 768  # rows of a matrix on the CPU: one product takes some milliseconds
_GPU_MATRIX = 8192
_PLAIN_MATRIX = 24  # without torch
_COPIED = 64 << 20  # bytes; larger than a usual cache
_GPU_COPIED = 512 << 20
_CHUNK = 1 << 20
_WRITTEN = 64 << 20  # maximum bytes of the file; a slow disk gets fewer
_NVIDIA_VERSION = "/proc/driver/nvidia/version"


def torch_module() -> Any:
    """Return torch; None if this interpreter has none, or if it cannot be imported."""
    if importlib.util.find_spec("torch") is None:
        return None
    try:
        import torch
    except Exception:
        return None
    return torch


def measure(probe: str, seconds: float, directory: Path) -> tuple[float, ...]:
    """Return the values of a probe, in the order of `measures.MEASURES`.

    Args:
        probe: the probe; one that needs other nodes is not known here.
        seconds: how long one measure lasts, about.
        directory: where the measured file is written.
    """
    if probe == Probe.CPU:
        return _multiply(seconds), _copy(seconds / 2)
    if probe == Probe.DISK:
        return _disk(seconds, directory)
    if probe == Probe.GPU:
        return _gpus(seconds)
    raise ValueError(f"unknown probe {probe}")


def _rate(work: float, do: Callable[[], object], seconds: float) -> float:
    """Return how much work is done per second, if `do` does `work`."""
    do()
    done, begin = 0.0, time.perf_counter()
    while True:
        do()
        done += work
        elapsed = time.perf_counter() - begin
        if elapsed >= seconds:
            return done / elapsed


def _multiply(seconds: float) -> float:
    """Return the GFLOP/s of a product of matrices on all cores that this process may use."""
    torch = torch_module()
    if torch is None:
        row = [1.5] * _PLAIN_MATRIX
        rows = [row] * _PLAIN_MATRIX

        def multiply() -> object:
            return [[sum(a * b for a, b in zip(x, y, strict=True)) for y in rows] for x in rows]

        return _rate(2e-9 * _PLAIN_MATRIX**3, multiply, seconds)
    torch.set_num_threads(devices.usable_cores())
    left, product = torch.ones(_MATRIX, _MATRIX), torch.empty(_MATRIX, _MATRIX)
    return _rate(2e-9 * _MATRIX**3, lambda: torch.mm(left, left, out=product), seconds)


def _copy(seconds: float) -> float:
    """Return the GB/s of copies in memory: bytes read and written."""
    torch = torch_module()
    if torch is None:
        source, target = bytes(_COPIED), memoryview(bytearray(_COPIED))

        def copy() -> object:
            target[:] = source
            return target

        return _rate(2e-9 * _COPIED, copy, seconds)
    tensor = torch.ones(_COPIED // 4)
    other = torch.empty_like(tensor)
    return _rate(2e-9 * _COPIED, lambda: other.copy_(tensor), seconds)


def _disk(seconds: float, directory: Path) -> tuple[float, float]:
    """Return the MB/s of writing a file to the disk and of reading it again.

    The file has no name, so nothing is left if this process is killed.
    """
    chunk = os.urandom(_CHUNK)  # a disk may compress
    with tempfile.TemporaryFile(dir=directory, buffering=0) as stream:
        begin, written = time.perf_counter(), 0
        while written < _WRITTEN and (
            written < 4 * _CHUNK or time.perf_counter() - begin < seconds
        ):
            written += stream.write(chunk)
        os.fsync(stream.fileno())
        write_rate = written / (time.perf_counter() - begin) / 1e6

        def read() -> None:
            # The kernel must forget what it has cached.
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            stream.seek(0)
            while stream.read(_CHUNK):
                pass

        return write_rate, _rate(written / 1e6, read, seconds / 2)


def _gpus(seconds: float) -> tuple[float, ...]:
    """Return the GFLOP/s of a product in 16 bits and the GB/s of copies, for each GPU."""
    torch = torch_module()
    if torch is None:
        raise RuntimeError("torch cannot be imported")
    found: list[float] = []
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(index):
            found += _gpu(torch, seconds / 2)
            torch.cuda.empty_cache()
    return tuple(found)


def _gpu(torch: Any, seconds: float) -> list[float]:
    matrix = torch.ones(_GPU_MATRIX, _GPU_MATRIX, dtype=torch.float16, device="cuda")
    product = torch.empty_like(matrix)

    def multiply() -> None:
        torch.mm(matrix, matrix, out=product)
        torch.cuda.synchronize()

    flops = _rate(2e-9 * _GPU_MATRIX**3, multiply, seconds)
    source = torch.ones(_GPU_COPIED // 4, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    return [flops, _rate(2e-9 * _GPU_COPIED, copy, seconds)]


def versions() -> tuple[tuple[str, str], ...]:
    """Return the version of each part that should be equal on all nodes; "none" if absent."""
    torch = torch_module()
    if torch is not None:
        torch_version = str(torch.__version__)
        cuda = torch.version.cuda or getattr(torch.version, "hip", None) or "none"
    else:
        torch_version, cuda = _installed("torch"), "none"
    found = (
        ("Python", platform.python_version()),
        ("torch", torch_version),
        ("CUDA", cuda),
        ("NVIDIA driver", _driver()),
        ("kernel", platform.release()),
    )
    return tuple((name, str(version)[:100]) for name, version in found)


def _installed(name: str) -> str:
    try:
        return f"{importlib.metadata.version(name)} (cannot be imported)"
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _driver() -> str:
    """Return the version in a line such as "NVRM version: NVIDIA ... Module  570.86.15  ..."."""
    line = files.read_text(_NVIDIA_VERSION).partition("\n")[0]
    words = [word for word in line.split() if word[:1].isdigit() and "." in word]
    return words[0] if words else "none"
