"""What a node uses, from the kernel and the drivers of its GPUs: machine, workers, GPUs.

Sources: proc(5), cgroups(7), and the kernel's cgroup-v2.rst, iostats.rst and gpu/amdgpu (thermal,
driver-misc, ras); NVIDIA's "NVML API Reference Guide".
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterjob.node.metrics.samples import Gpu, GpuSample, WorkerSample
from clusterjob.node.system import files, processes
from clusterjob.node.system.devices import listed_gpus

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SECTOR = 512  # bytes; the unit of /sys/block/*/stat
_NO_LIMIT = 1 << 60  # bytes; cgroup v1 writes a larger number for no limit
# Devices that are made of others, or of memory.
_VIRTUAL_DISK = re.compile(r"(loop|ram|zram|dm-|md|sr|nbd|drbd)")
# Seconds between two readings of the GPUs, and without an answer until their values are unknown.
_GPU_PAUSE, _GPU_TIMEOUT = 5.0, 15.0
GpuState = tuple[tuple[Gpu, ...], tuple[GpuSample, ...]]


# -- the machine -----------------------------------------------------------------------------------


class Machine:
    """Measure the machine of this process; `root` replaces ``/`` in tests.

    The memory is that of the nearest control group with a limit, such as the job's under Slurm;
    without one, it is that of the machine.

    Attributes:
        memory: the bytes of memory that the job may use.
    """

    def __init__(self, root: str = "") -> None:
        self._root = root
        limits = (
            (group, _number(group / "memory.max") or _number(group / "memory.limit_in_bytes") or 0)
            for group in processes.memory_cgroups(root)
        )
        limited = ((group, limit) for group, limit in limits if 0 < limit < _NO_LIMIT)
        none: tuple[Path | None, int] = (None, _NO_LIMIT)
        self._group, limit = next(limited, none)
        self.memory = min(_meminfo(root).get("MemTotal", 0), limit)
        self._disks = [
            f"{root}/sys/block/{name}/stat"
            for name in files.listed(f"{root}/sys/block")
            if not _VIRTUAL_DISK.match(name)
            and not _number(f"{root}/sys/block/{name}/hidden")  # a path of a multipath NVMe disk
        ]
        network, infiniband = f"{root}/sys/class/net", f"{root}/sys/class/infiniband"
        names = [name for name in files.listed(network) if name != "lo"]
        # Bridges and tunnels would count the bytes of the devices below them again.
        physical = [name for name in names if os.path.exists(f"{network}/{name}/device")]
        # The directories of counters, the names of those of bytes, and their unit.
        self._networks = [
            (f"{network}/{name}/statistics", "rx_bytes", "tx_bytes", 1)
            for name in physical or names
        ]
        self._networks += [  # RDMA bypasses the interfaces
            (f"{infiniband}/{device}/ports/{port}/counters", "port_rcv_data", "port_xmit_data", 4)
            for device in files.listed(infiniband)
            for port in files.listed(f"{infiniband}/{device}/ports")
        ]
        self._at = time.monotonic()
        self._last = self._counters()

    def sample(self) -> dict[str, Any]:
        """Return what was used since the last call: the values of `Sample` about the machine."""
        now, counters = time.monotonic(), self._counters()
        rates = _rates(counters, self._last, now - self._at)
        self._at, self._last = now, counters
        load = files.read_text(f"{self._root}/proc/loadavg").split()
        return {**rates, "memory": self._used(), "load": float(load[0]) if load else 0.0}

    def _counters(self) -> dict[str, float]:
        ticks = files.read_text(f"{self._root}/proc/stat", 400).split("\n", 1)[0].split()[1:9]
        busy = sum(map(int, ticks)) - sum(map(int, ticks[3:5]))  # idle and waiting for I/O
        found = {"cpu": 100 * busy / _TICKS, "received": 0.0, "sent": 0.0}
        for place, received, sent, unit in self._networks:
            found["received"] += unit * (_number(f"{place}/{received}") or 0)
            found["sent"] += unit * (_number(f"{place}/{sent}") or 0)
        disks = [fields for path in self._disks if len(fields := files.read_text(path).split()) > 6]
        found["read"] = _SECTOR * sum(int(fields[2]) for fields in disks)
        found["written"] = _SECTOR * sum(int(fields[6]) for fields in disks)
        return found

    def _used(self) -> int:
        if self._group is not None:
            names = ("memory.current", "memory.usage_in_bytes")
            used = next(filter(None, (_number(self._group / name) for name in names)), 0)
            # The kernel drops this part of the page cache before it runs out of memory.
            statistics = files.read_text(self._group / "memory.stat")
            cache = re.search(r"^(?:total_)?inactive_file (\d+)", statistics, re.MULTILINE)
            return max(0, used - int(cache[1] if cache else 0))
        memory = _meminfo(self._root)
        return max(0, memory.get("MemTotal", 0) - memory.get("MemAvailable", 0))


_RATES = ("cpu", "received", "sent", "read", "written")


def _rates(new: Mapping[str, float], old: Mapping[str, float], seconds: float) -> dict[str, Any]:
    """Return how fast the counters have grown; a device may have been added again."""
    return {
        name: max(0.0, (new[name] - old.get(name, 0.0)) / max(seconds, 0.01))
        for name in _RATES
        if name in new
    }


def _meminfo(root: str) -> dict[str, int]:
    """Return the sizes of /proc/meminfo in bytes."""
    text = files.read_text(f"{root}/proc/meminfo")
    found = re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE)
    return {name: int(size) * 1024 for name, size in found}


def _number(path: Path | str) -> int | None:
    text = files.read_text(path, 40).strip()
    return int(text) if text.isdecimal() else None


# -- the workers -----------------------------------------------------------------------------------


class Workers:
    """Measure the workers of a node, with the processes below them.

    The CPU time and I/O of a child that was reaped are in the counters of its parent, so that the
    sums over a worker's processes never lose them. An orphan is no longer below its worker.

    Args:
        find: returns the rank of each worker by pid; the result may change.
        at: the monotonic time from which the first sample counts.
    """

    def __init__(self, find: Callable[[], Mapping[int, int]], at: float) -> None:
        self._find = find
        self._at = at
        self._last: dict[int, Counter[str]] = {}  # the counters of each worker, by pid

    def sample(self, more: Mapping[int, Mapping[str, Any]]) -> tuple[WorkerSample, ...]:
        """Return what each worker used since the last call.

        Args:
            more: further values by rank.
        """
        now, seconds = time.monotonic(), time.monotonic() - self._at
        stats = processes.running()
        children = processes.children(stats)
        found, last = dict[int, WorkerSample](), self._last
        self._last, self._at = {}, now
        for pid, rank in self._find().items():
            if pid in stats:
                sums = self._last[pid] = Counter()
                for each in (pid, *processes.below(pid, children)):
                    sums.update(_use_of(each, stats[each]))
                found[rank] = WorkerSample(
                    rank,
                    **_rates(sums, last.get(pid, {}), seconds),
                    rss=sums["rss"],
                    threads=sums["threads"],
                    **more.get(rank, {}),
                )
        return tuple(found[rank] for rank in sorted(found))


def _use_of(pid: int, fields: list[str]) -> dict[str, Any]:
    """Return the counters of a process, and its memory and threads."""
    io = dict(re.findall(r"^(\w+): (\d+)$", files.read_text(f"/proc/{pid}/io"), re.M))
    lives = fields[0] not in "ZX"
    return {
        "cpu": 100 * sum(map(int, fields[11:15])) / _TICKS,
        "read": int(io.get("read_bytes", 0)),
        "written": int(io.get("write_bytes", 0)),
        "rss": int(fields[21]) * _PAGE * lives,
        "threads": int(fields[17]) * lives,
    }


# -- the GPUs --------------------------------------------------------------------------------------


class GpuReader:
    """Read the GPUs that the job may use in a daemon thread.

    A driver that hangs keeps only this thread; one that was unloaded ends it.

    Args:
        environ: the variables that select the GPUs.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._state: GpuState | None = None
        self._at = 0.0
        threading.Thread(target=self._run, args=(environ,), name="gpus", daemon=True).start()

    def state(self) -> GpuState | None:
        """Return the GPUs and their states; None if the driver has not answered for long."""
        return self._state if time.monotonic() - self._at < _GPU_TIMEOUT else None

    def _run(self, environ: Mapping[str, str]) -> None:
        with contextlib.suppress(Exception):
            try:
                read = Nvml(environ).read
            except OSError:
                read = amd_gpus(environ)
            while True:
                self._state = read()
                self._at = time.monotonic()
                time.sleep(_GPU_PAUSE)


_LIBRARY = "libnvidia-ml.so.1"
_TEMPERATURE_GPU = 0
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_UNCORRECTED, _VOLATILE = 1, 0  # kind of ECC error; counted since the driver was loaded
_EVENT_XID = 8
_NAME_BYTES = 96
# Structures of NVML as arrays of unsigned numbers.
_UTILIZATION = ctypes.c_uint * 2  # gpu, memory
_MEMORY = ctypes.c_ulonglong * 5  # version, total, reserved, free, used
_MEMORY_VERSION = ctypes.sizeof(_MEMORY) | 2 << 24
_EVENT = ctypes.c_ulonglong * 4  # device, type, data, instances


class Nvml:
    """The NVIDIA GPUs that a job may use.

    Each call may fail: a GPU without ECC, an old driver without a function, a GPU that has fallen
    off the bus. Then the value is None.

    Args:
        environ: CUDA_VISIBLE_DEVICES selects the GPUs, by index, UUID or MIG device.

    Raises:
        OSError: there is no NVML, no driver or no GPU.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._library = ctypes.CDLL(_LIBRARY)
        if not self._call("nvmlInit_v2"):
            raise OSError("NVML finds no driver")
        count = self._number("nvmlDeviceGetCount_v2") or 0
        self._handles: dict[int, ctypes.c_void_p] = {}  # by index
        for entry in listed_gpus(environ.get("CUDA_VISIBLE_DEVICES"), count):
            name, key = (
                ("nvmlDeviceGetHandleByIndex_v2", int(entry))
                if entry.isdigit()
                else ("nvmlDeviceGetHandleByUUID", entry.encode())
            )
            handle = self._get(ctypes.c_void_p(), name, key)
            if handle is not None:  # not one that has fallen off the bus, or is another user's
                index = self._number("nvmlDeviceGetIndex", handle)
                # A MIG device has no index.
                self._handles[count + len(self._handles) if index is None else index] = handle
        if not self._handles:
            raise OSError("NVML finds no GPU of the job")
        self._gpus = tuple(
            Gpu(
                index,
                self._text("nvmlDeviceGetUUID", handle),
                name=self._text("nvmlDeviceGetName", handle) or "NVIDIA GPU",
                memory=self._memory(handle)[1] or 0,
            )
            for index, handle in self._handles.items()
        )
        self._events = self._get(ctypes.c_void_p(), "nvmlEventSetCreate")
        kind = ctypes.c_ulonglong(_EVENT_XID)
        self._xids: dict[int | None, int] = {  # by handle, of those whose XIDs the driver reports
            handle.value: 0
            for handle in self._handles.values()
            if self._events is not None
            and self._call("nvmlDeviceRegisterEvents", handle, kind, self._events)
        }

    def read(self) -> GpuState:
        """Return the GPUs and their states."""
        event = _EVENT()
        # Without a new event, the call fails at once.
        while self._events is not None and self._call(
            "nvmlEventSetWait_v2", self._events, ctypes.byref(event), 0
        ):
            self._xids[event[0]] = event[2]
        return self._gpus, tuple(map(self._sample, self._handles.values()))

    def _sample(self, handle: ctypes.c_void_p) -> GpuSample:
        use = self._get(_UTILIZATION(), "nvmlDeviceGetUtilizationRates", handle)
        power = self._number("nvmlDeviceGetPowerUsage", handle)
        return GpuSample(
            None if use is None else float(use[0]),
            self._memory(handle)[4],
            power=None if power is None else power / 1000,
            temperature=self._number("nvmlDeviceGetTemperature", handle, _TEMPERATURE_GPU),
            sm_clock=self._number("nvmlDeviceGetClockInfo", handle, _CLOCK_SM),
            memory_clock=self._number("nvmlDeviceGetClockInfo", handle, _CLOCK_MEMORY),
            ecc=self._number(
                "nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _VOLATILE,
                kind=ctypes.c_ulonglong,
            ),
            xid=self._xids.get(handle.value),
        )  # fmt: skip

    def _call(self, name: str, *arguments: Any) -> bool:
        """Call a function; return whether this driver has it, and it succeeds."""
        function = getattr(self._library, name, None)
        return function is not None and int(function(*arguments)) == 0

    def _get(self, result: Any, name: str, *arguments: Any) -> Any:
        """Return the result that a function writes through its last argument; None if it fails."""
        return result if self._call(name, *arguments, ctypes.byref(result)) else None

    def _number(self, name: str, *arguments: Any, kind: Any = ctypes.c_uint) -> int | None:
        value = self._get(kind(), name, *arguments)
        return None if value is None else int(value.value)

    def _text(self, name: str, handle: ctypes.c_void_p) -> str:
        buffer = ctypes.create_string_buffer(_NAME_BYTES)
        self._call(name, handle, buffer, ctypes.c_uint(_NAME_BYTES))
        return buffer.value.decode(errors="replace")

    def _memory(self, handle: ctypes.c_void_p) -> Sequence[int | None]:
        """Return a `_MEMORY`, which excludes the driver's reserve as nvidia-smi does."""
        found = self._get(_MEMORY(_MEMORY_VERSION), "nvmlDeviceGetMemoryInfo_v2", handle)
        return found or (None,) * 5


def amd_gpus(environ: Mapping[str, str], root: str = "") -> Callable[[], GpuState]:
    """Return a function that reads the AMD GPUs of the job from the files of the amdgpu driver.

    Args:
        environ: ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES select the GPUs, by index.
        root: replaces ``/`` in tests.

    Raises:
        OSError: there is no such GPU.
    """
    names = [
        name for name in files.listed(f"{root}/sys/class/drm") if re.fullmatch(r"card\d+", name)
    ]
    boards = [
        board
        for name in sorted(names, key=lambda name: int(name[4:]))
        if _word(board := Path(f"{root}/sys/class/drm/{name}/device"), "vendor") == "0x1002"
    ]
    places = list(enumerate(boards))
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        # The second variable counts the GPUs that the first one has left.
        listed = listed_gpus(environ.get(variable), len(places))
        places = [places[int(entry)] for entry in listed if entry.isdigit()]
    if not places:
        raise OSError("there is no AMD GPU of the job")
    gpus = tuple(
        Gpu(
            index,
            _word(board, "unique_id"),
            name=_word(board, "product_name") or "AMD GPU",
            memory=_number(board / "mem_info_vram_total") or 0,
        )
        for index, board in places
    )
    return lambda: (gpus, tuple(_amd_sample(board) for _, board in places))


def _amd_sample(board: Path) -> GpuSample:
    hwmon = next(iter(sorted(board.glob("hwmon/hwmon*"))), board)

    def sensor(name: str, unit: int) -> int | None:
        value = _number(hwmon / name)
        return None if value is None else value // unit

    power = sensor("power1_average", 10**6)  # from microwatts
    counts = files.read_text(board / "ras/umc_err_count", 200)
    errors = re.search(r"^ue: (\d+)", counts, re.MULTILINE)
    return GpuSample(
        _number(board / "gpu_busy_percent"),
        _number(board / "mem_info_vram_used"),
        power=sensor("power1_input", 10**6) if power is None else power,
        temperature=sensor("temp1_input", 1000),
        sm_clock=sensor("freq1_input", 10**6),
        memory_clock=sensor("freq2_input", 10**6),
        ecc=int(errors[1]) if errors else None,
    )


def _word(board: Path, name: str) -> str:
    return files.read_text(board / name, 80).strip()
