"""Read the state of NVIDIA GPUs through NVML (libnvidia-ml.so.1).

Each call may fail: a GPU without ECC, an old driver without a function, a GPU that has fallen off
the bus. Then the value is None. Source: NVIDIA's "NVML API Reference Guide".
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from typing import Any

from clusterjob.node.metrics.samples import Gpu, GpuSample
from clusterjob.node.system.devices import listed_gpus

_LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0
_TEMPERATURE_GPU = 0
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_UNCORRECTED, _VOLATILE = 1, 0  # kind of ECC error; counted since the driver was loaded
_EVENT_XID = 8
_NAME_BYTES = 96
_ECC_PAUSE = 60.0  # seconds between two readings, which are slow
_MAX_EVENTS = 64  # events to read at a time


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _MemoryV2(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Event(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_void_p),
        ("type", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Nvml:
    """The NVIDIA GPUs that a job may use.

    Args:
        environ: CUDA_VISIBLE_DEVICES selects the GPUs, by index, UUID or MIG device.

    Raises:
        OSError: there is no NVML, no driver or no GPU.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._library = ctypes.CDLL(_LIBRARY)
        if self._call("nvmlInit_v2") != _SUCCESS:
            raise OSError("NVML finds no driver")
        self._handles = self._visible(environ)
        if not self._handles:
            raise OSError("NVML finds no GPU of the job")
        self.gpus = tuple(
            Gpu(index, self._text("nvmlDeviceGetUUID", handle) or "",
                name=self._text("nvmlDeviceGetName", handle) or "NVIDIA GPU",
                memory=self._memory(handle)[1] or 0)
            for index, handle in self._handles
        )  # fmt: skip
        self._ecc: dict[int, int | None] = {}
        self._ecc_due = 0.0
        self._xids = dict.fromkeys((index for index, _ in self._handles), 0)
        self._events = self._watch_xids()

    def sample(self) -> tuple[GpuSample, ...]:
        """Return the state of each GPU."""
        self._read_events()
        if time.monotonic() >= self._ecc_due:
            self._ecc_due = time.monotonic() + _ECC_PAUSE
            self._ecc = {
                index: self._number(
                    "nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _VOLATILE,
                    kind=ctypes.c_ulonglong,
                )
                for index, handle in self._handles
            }  # fmt: skip
        return tuple(self._sample(index, handle) for index, handle in self._handles)

    def _sample(self, index: int, handle: ctypes.c_void_p) -> GpuSample:
        use = _Utilization()
        known = self._call("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(use)) == _SUCCESS
        power = self._number("nvmlDeviceGetPowerUsage", handle)
        return GpuSample(
            float(use.gpu) if known else None,
            self._memory(handle)[0],
            power=None if power is None else power / 1000,
            temperature=self._number("nvmlDeviceGetTemperature", handle, _TEMPERATURE_GPU),
            sm_clock=self._number("nvmlDeviceGetClockInfo", handle, _CLOCK_SM),
            memory_clock=self._number("nvmlDeviceGetClockInfo", handle, _CLOCK_MEMORY),
            ecc=self._ecc.get(index),
            xid=self._xids[index] if self._events is not None else None,
        )

    def _call(self, name: str, *arguments: Any) -> int:
        """Call a function; return its code, or -1 if this driver does not have it."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            return -1
        return int(function(*arguments))

    def _number(
        self, name: str, handle: ctypes.c_void_p, *arguments: int, kind: Any = ctypes.c_uint
    ) -> int | None:
        value = kind()
        code = self._call(name, handle, *arguments, ctypes.byref(value))
        return int(value.value) if code == _SUCCESS else None

    def _text(self, name: str, handle: ctypes.c_void_p) -> str | None:
        buffer = ctypes.create_string_buffer(_NAME_BYTES)
        code = self._call(name, handle, buffer, ctypes.c_uint(_NAME_BYTES))
        return buffer.value.decode(errors="replace") if code == _SUCCESS else None

    def _memory(self, handle: ctypes.c_void_p) -> tuple[int | None, int | None]:
        """Return the used and the total memory; nvidia-smi excludes the driver's reserve too."""
        second = _MemoryV2(version=ctypes.sizeof(_MemoryV2) | 2 << 24)
        if self._call("nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(second)) == _SUCCESS:
            return second.used, second.total
        first = _Memory()
        if self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(first)) == _SUCCESS:
            return first.used, first.total
        return None, None

    def _visible(self, environ: Mapping[str, str]) -> list[tuple[int, ctypes.c_void_p]]:
        """Return the index and the handle of each GPU of the job."""
        count = ctypes.c_uint()
        if self._call("nvmlDeviceGetCount_v2", ctypes.byref(count)) != _SUCCESS:
            return []
        handles: dict[int, ctypes.c_void_p] = {}
        for index in range(min(count.value, 1024)):
            handle = ctypes.c_void_p()
            code = self._call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
            if code == _SUCCESS:  # not one that has fallen off the bus, or is another user's
                handles[index] = handle
        uuids = {
            index: self._text("nvmlDeviceGetUUID", handle) for index, handle in handles.items()
        }
        found: list[tuple[int, ctypes.c_void_p]] = []
        for entry in listed_gpus(environ.get("CUDA_VISIBLE_DEVICES"), count.value):
            if entry.startswith("MIG-"):
                handle = ctypes.c_void_p()
                code = self._call("nvmlDeviceGetHandleByUUID", entry.encode(), ctypes.byref(handle))
                if code == _SUCCESS:
                    found.append((len(handles) + len(found), handle))
            elif entry.startswith("GPU-"):  # CUDA accepts the begin of a UUID
                found += [
                    (index, handles[index])
                    for index, uuid in uuids.items()
                    if uuid and uuid.startswith(entry)
                ]
            elif int(entry) in handles:
                found.append((int(entry), handles[int(entry)]))
        return found

    def _watch_xids(self) -> ctypes.c_void_p | None:
        """Return a set of events of all GPUs; None if the driver does not report XIDs."""
        events = ctypes.c_void_p()
        if self._call("nvmlEventSetCreate", ctypes.byref(events)) != _SUCCESS:
            return None
        codes = [
            self._call("nvmlDeviceRegisterEvents", handle, ctypes.c_ulonglong(_EVENT_XID), events)
            for _, handle in self._handles
        ]
        return events if _SUCCESS in codes else None

    def _read_events(self) -> None:
        indices = {handle.value: index for index, handle in self._handles}
        for _ in range(_MAX_EVENTS if self._events is not None else 0):
            event = _Event()
            code = self._call("nvmlEventSetWait_v2", self._events, ctypes.byref(event), 0)
            if code == -1:
                code = self._call("nvmlEventSetWait", self._events, ctypes.byref(event), 0)
            if code != _SUCCESS:  # mostly a timeout: no more events
                return
            if event.type == _EVENT_XID and event.device in indices:
                self._xids[indices[event.device]] = int(event.data)
