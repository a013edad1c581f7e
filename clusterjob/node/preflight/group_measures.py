"""Measure an all-reduce of several nodes with torch.distributed, as the workers will use it."""

from __future__ import annotations

import contextlib
import statistics
import time
from datetime import timedelta
from typing import Any

from clusterjob.node.preflight.host_measures import torch_module
from clusterjob.node.preflight.preflight_messages import MeasureGroup

_BYTES = 4 << 20
_GPU_BYTES = 64 << 20
_TIMEOUT = timedelta(seconds=4)
_MIN_TIMES, _MAX_TIMES = 2, 200


def backends() -> tuple[str, ...]:
    """Return the usable backends of torch.distributed; empty without torch."""
    torch = torch_module()
    if torch is None or not torch.distributed.is_available():
        return ()
    nccl = torch.distributed.is_nccl_available() and torch.cuda.device_count() > 0
    return ("nccl", "gloo") if nccl else ("gloo",) if torch.distributed.is_gloo_available() else ()


class Groups:
    """The process groups of this node, one after another, over one store.

    Args:
        address, port: the store.
    """

    def __init__(self, address: str, port: int) -> None:
        self._address, self._port = address, port
        self._server: Any = None
        self._client: Any = None

    def serve(self, listener: int) -> None:
        """Serve the store with its listening socket from now on."""
        from torch.distributed import TCPStore

        self._server = TCPStore(
            self._address,
            self._port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener,
        )

    def measure(self, order: MeasureGroup) -> tuple[float]:
        """Form a group, and return the bus bandwidth of its all-reduce in GB/s.

        The bus bandwidth is the bytes that each node sends per second. It does not depend on the
        number of nodes (as in nccl-tests), so pairs and rings can be compared.
        """
        import torch
        from torch import distributed

        if self._client is None:
            self._client = distributed.TCPStore(
                self._address, self._port, is_master=False, timeout=_TIMEOUT
            )
        torch.set_num_threads(1)  # the network is measured, not the addition
        device = torch.device("cpu")
        if order.backend == "nccl":  # another GPU, and so another network card, in each step
            device = torch.device("cuda", order.number % torch.cuda.device_count())
            torch.cuda.set_device(device)
        distributed.init_process_group(
            order.backend,
            store=distributed.PrefixStore(f"preflight{order.number}", self._client),
            rank=order.rank,
            world_size=order.size,
            timeout=_TIMEOUT,
        )
        try:
            seconds = _time_of_all_reduce(torch, device, order.seconds)
        finally:
            with contextlib.suppress(Exception):  # the error of the measure counts
                distributed.destroy_process_group()
        sent = 2 * (order.size - 1) / order.size * _size(device)
        return (sent / max(seconds, 1e-6) / 1e9,)


def _size(device: Any) -> int:
    return _GPU_BYTES if device.type == "cuda" else _BYTES


def _time_of_all_reduce(torch: Any, device: Any, seconds: float) -> float:
    """Return the median time of an all-reduce.

    The first element of the data tells whether a rank wants to stop, so all ranks stop together.
    """
    data = torch.zeros(_size(device) // 4, device=device)
    torch.distributed.all_reduce(data)  # connects
    times: list[float] = []
    begin = time.perf_counter()
    while True:
        data.zero_()
        over = time.perf_counter() - begin >= seconds and len(times) >= _MIN_TIMES - 1
        data[0] = float(over or len(times) >= _MAX_TIMES - 1)
        before = time.perf_counter()
        torch.distributed.all_reduce(data)
        stop = data[0].item() > 0  # waits for a GPU
        times.append(time.perf_counter() - before)
        if stop:
            return statistics.median(times)
