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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from clusterjob.node.metrics.samples import Gpu, GpuSample, WorkerSample
from clusterjob.node.system import files, processes
from clusterjob.node.system.devices import listed_gpus

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SECTOR = 512  # bytes; the unit of /sys/block/*/stat
# Devices that are made of others, or of memory.
_VIRTUAL_DISK = re.compile(r"(loop|ram|zram|dm-|md|sr|nbd|drbd)")
_PSS_PAUSE = 60.0  # minimum seconds between two readings
_PSS_SHARE = 2000  # a reading that took t seconds is repeated after this many times t
_PSS_LARGEST = 32 << 30  # bytes of RSS: the reading of a larger process locks its memory too long
_PSS_FIRST = 8.0  # seconds: while workers start, they need the CPU
T = TypeVar("T")
GpuState = tuple[tuple[Gpu, ...], tuple[GpuSample, ...]]


class Background(Generic[T]):
    """Call a function again and again in a daemon thread; nobody waits for the thread.

    A hanging driver, or a process whose memory lock is held, keeps only this thread.

    Args:
        name: the thread's name.
        open_source: returns the function; an exception of either ends the thread.
        pause: minimum seconds between two calls.
        delay: seconds until the first call.
        share: the pause is at least this many times as long as the call.

    Attributes:
        value: the newest value; None before the first one.
        at: the monotonic time of the newest value.
    """

    def __init__(
        self,
        name: str,
        open_source: Callable[[], Callable[[], T]],
        pause: float,
        delay: float = 0.0,
        share: float = 1.0,
    ) -> None:
        self.value: T | None = None
        self.at = float("-inf")
        self._stopped = threading.Event()

        def run() -> None:
            with contextlib.suppress(Exception):  # such as a driver that was unloaded
                wait, read = delay, open_source()
                while not self._stopped.wait(wait):
                    begin = time.monotonic()
                    self.value = read()
                    self.at = time.monotonic()
                    wait = max(pause, share * (self.at - begin))

        threading.Thread(target=run, name=name, daemon=True).start()

    def stop(self) -> None:
        """End the thread when it is not in a call."""
        self._stopped.set()


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
        self._group, limit = _limited_group(root)
        total = _meminfo(root).get("MemTotal", 0)
        self.memory = min(filter(None, (total, limit)), default=0)
        self._disks = [
            f"{root}/sys/block/{name}/stat"
            for name in _listed(f"{root}/sys/block")
            if not _VIRTUAL_DISK.match(name)
            and not _number(f"{root}/sys/block/{name}/hidden")  # a path of a multipath NVMe disk
        ]
        network, infiniband = f"{root}/sys/class/net", f"{root}/sys/class/infiniband"
        names = [name for name in _listed(network) if name != "lo"]
        # Bridges and tunnels would count the bytes of the devices below them again.
        physical = [name for name in names if os.path.exists(f"{network}/{name}/device")]
        self._interfaces = [f"{network}/{name}/statistics" for name in physical or names]
        self._ports = [
            f"{infiniband}/{device}/ports/{port}/counters"
            for device in _listed(infiniband)
            for port in _listed(f"{infiniband}/{device}/ports")
        ]
        self._at = time.monotonic()
        self._last = self._counters()

    def sample(self) -> dict[str, Any]:
        """Return what was used since the last call: the values of `Sample` about the machine."""
        now, counters = time.monotonic(), self._counters()
        seconds = max(now - self._at, 0.01)
        rates = {
            name: max(0.0, (value - self._last[name]) / seconds)
            for name, value in counters.items()
        }  # fmt: skip
        self._at, self._last = now, counters
        load = files.read_text(f"{self._root}/proc/loadavg").split()
        return {**rates, "memory": self._used(), "load": float(load[0]) if load else 0.0}

    def _counters(self) -> dict[str, float]:
        ticks = files.read_text(f"{self._root}/proc/stat", 400).split("\n", 1)[0].split()[1:9]
        busy = sum(map(int, ticks)) - sum(map(int, ticks[3:5]))  # idle and waiting for I/O
        # RDMA bypasses the interfaces; its unit is 4 bytes.
        received = sum(_number(f"{each}/rx_bytes") or 0 for each in self._interfaces)
        received += sum(4 * (_number(f"{port}/port_rcv_data") or 0) for port in self._ports)
        sent = sum(_number(f"{each}/tx_bytes") or 0 for each in self._interfaces)
        sent += sum(4 * (_number(f"{port}/port_xmit_data") or 0) for port in self._ports)
        disks = [files.read_text(path).split() for path in self._disks]
        read = sum(int(fields[2]) for fields in disks if len(fields) > 6)
        written = sum(int(fields[6]) for fields in disks if len(fields) > 6)
        return {
            "cpu": 100 * busy / _TICKS,
            "received": received,
            "sent": sent,
            "read": read * _SECTOR,
            "written": written * _SECTOR,
        }

    def _used(self) -> int:
        if self._group is not None:
            for name in ("memory.current", "memory.usage_in_bytes"):
                if used := _number(self._group / name):
                    # The kernel drops this part of the page cache before it runs out of memory.
                    statistics = files.read_text(self._group / "memory.stat")
                    cache = re.search(r"^(?:total_)?inactive_file (\d+)", statistics, re.MULTILINE)
                    return max(0, used - int(cache[1] if cache else 0))
        memory = _meminfo(self._root)
        return max(0, memory.get("MemTotal", 0) - memory.get("MemAvailable", 0))


def _limited_group(root: str) -> tuple[Path | None, int]:
    """Return the nearest control group of this process that limits its memory, and its limit.

    In a container the mounted root is the container's own group.
    """
    for line in files.read_text(f"{root}/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, name = f"{root}/sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = f"{root}/sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = Path(f"{top}{path}")
        for each in (group, *group.parents):
            limit = _number(each / name) or 0
            if 0 < limit < 1 << 60:  # cgroup v1 writes a huge number for no limit
                return each, limit
            if str(each) == top:
                break
    return None, 0


def _meminfo(root: str) -> dict[str, int]:
    """Return the sizes of /proc/meminfo in bytes."""
    text = files.read_text(f"{root}/proc/meminfo")
    found = re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE)
    return {name: int(size) * 1024 for name, size in found}


def _number(path: Path | str) -> int | None:
    text = files.read_text(path, 40).strip()
    return int(text) if text.isdecimal() else None


def _listed(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


# -- the workers -----------------------------------------------------------------------------------


@dataclass
class _Counters:
    """The counters of a worker's processes, summed up."""

    cpu: float = 0.0  # seconds
    read: int = 0  # bytes
    written: int = 0
    rss: int = 0
    threads: int = 0
    started: float = float("inf")  # of its oldest process, seconds since boot


class Workers:
    """Measure the workers of a node, with the processes below them.

    The CPU time and I/O of a child that was reaped are in the counters of its parent, so that the
    sums over a worker's processes never lose them.

    Args:
        find: returns the rank of each worker by pid; the result may change.
    """

    def __init__(self, find: Callable[[], Mapping[int, int]]) -> None:
        self._find = find
        self._workers: Mapping[int, int] = {}
        self._seen: set[int] = set()  # all processes of the machine at the last sample
        # The processes of the workers: the rank, and the start time in ticks.
        self._owners: dict[int, tuple[int, str]] = {}
        self._last: dict[int, _Counters] = {}  # by rank
        self._at = 0.0
        self._pss: Background[dict[int, int]] | None = None

    def sample(self) -> dict[int, WorkerSample]:
        """Return what each worker used since the last call, or since its own start."""
        now = time.monotonic()
        boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._follow()
        counters = self._counters()
        if counters and self._pss is None:
            self._pss = Background(
                "pss", lambda: self._read_pss, _PSS_PAUSE, delay=_PSS_FIRST, share=_PSS_SHARE
            )
        pss = self._pss.value if self._pss is not None else None
        samples = {}
        for rank, new in sorted(counters.items()):
            old = self._last.get(rank)
            seconds = now - self._at
            if old is None:
                old, seconds = _Counters(), max(boot - new.started, 1 / _TICKS)
            samples[rank] = WorkerSample(
                max(0.0, 100 * (new.cpu - old.cpu) / seconds),
                new.rss,
                pss=(pss or {}).get(rank),
                read=max(0.0, (new.read - old.read) / seconds),
                written=max(0.0, (new.written - old.written) / seconds),
                threads=new.threads,
            )
        self._last, self._at = counters, now
        return samples

    def stop(self) -> None:
        """End the thread of the PSS."""
        if self._pss is not None:
            self._pss.stop()

    def _counters(self) -> dict[int, _Counters]:
        found: dict[int, _Counters] = {}
        for pid, (rank, started) in list(self._owners.items()):
            fields = processes.stat_fields(pid)
            if fields is None or fields[19] != started:
                del self._owners[pid]
                continue
            sums = found.setdefault(rank, _Counters())
            sums.cpu += sum(map(int, fields[11:15])) / _TICKS
            sums.started = min(sums.started, int(started) / _TICKS)
            if fields[0] not in "ZX":
                sums.rss += int(fields[21]) * _PAGE
                sums.threads += int(fields[17])
            io = dict(re.findall(r"^(\w+): (\d+)$", files.read_text(f"/proc/{pid}/io"), re.M))
            sums.read += int(io.get("read_bytes", 0))
            sums.written += int(io.get("write_bytes", 0))
        return found

    def _follow(self) -> None:
        """Find new processes below the workers.

        A process keeps its owner when its parent ends. Only new processes are examined: a machine
        may have thousands.
        """
        workers = self._find()
        if workers != self._workers:
            unchanged = {rank for pid, rank in workers.items() if self._workers.get(pid) == rank}
            self._last = {r: sums for r, sums in self._last.items() if r in unchanged}
            self._workers = dict(workers)
            self._seen, self._owners = set(), {}
            self.stop()
            self._pss = None
        if not workers:
            return
        now = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        new = {}
        for pid in now - self._seen:
            if (fields := processes.stat_fields(pid)) is not None:
                new[pid] = fields
        found = {pid: rank for pid, rank in workers.items() if pid in new}
        while True:  # one generation after the other
            self._owners |= {pid: (rank, new.pop(pid)[19]) for pid, rank in found.items()}
            parents = {pid: int(fields[1]) for pid, fields in new.items()}
            found = {
                pid: self._owners[parent][0]
                for pid, parent in parents.items()
                if parent in self._owners
            }
            if not found:
                break
        self._seen = now

    def _read_pss(self) -> dict[int, int]:
        """Return the PSS of each worker in bytes, without those that have a large process."""
        found: dict[int, int] = {}
        large = set()
        for pid, (rank, _) in list(self._owners.items()):
            fields = processes.stat_fields(pid)
            if fields is not None and int(fields[21]) * _PAGE > _PSS_LARGEST:
                large.add(rank)
                continue
            text = files.read_text(f"/proc/{pid}/smaps_rollup")
            if pss := re.search(r"^Pss: +(\d+)", text, re.MULTILINE):
                found[rank] = found.get(rank, 0) + int(pss[1]) * 1024
        return {rank: size for rank, size in found.items() if rank not in large}


# -- the GPUs --------------------------------------------------------------------------------------


def open_gpus(environ: Mapping[str, str]) -> Callable[[], GpuState]:
    """Return a function that reads the GPUs that the job may use, and their states.

    Args:
        environ: the variables that select the GPUs.

    Raises:
        OSError: there is no GPU.
    """
    try:
        return Nvml(environ).read
    except OSError:
        return amd_gpus(environ)


_LIBRARY = "libnvidia-ml.so.1"
_TEMPERATURE_GPU = 0
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_UNCORRECTED, _VOLATILE = 1, 0  # kind of ECC error; counted since the driver was loaded
_EVENT_XID = 8
_NAME_BYTES = 96
_ECC_PAUSE = 60.0  # seconds between two readings, which are slow
_MAX_EVENTS = 64  # events to read at a time
# Structures of NVML as arrays of unsigned numbers.
_UTILIZATION = ctypes.c_uint * 2  # gpu, memory
_MEMORY = ctypes.c_ulonglong * 3  # total, free, used
_MEMORY_V2 = ctypes.c_ulonglong * 5  # version, total, reserved, free, used
_VERSION_2 = ctypes.sizeof(_MEMORY_V2) | 2 << 24
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
        count = self._get(ctypes.c_uint(), "nvmlDeviceGetCount_v2")
        count = 0 if count is None else count.value
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
        self._ecc: dict[int, int | None] = {}
        self._ecc_due = 0.0
        self._events = self._watch_xids()
        self._xids: dict[int | None, int] = {}  # by handle

    def read(self) -> GpuState:
        """Return the GPUs and their states."""
        self._read_xids()
        if time.monotonic() >= self._ecc_due:
            self._ecc_due = time.monotonic() + _ECC_PAUSE
            self._ecc = {
                index: self._number(
                    "nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _VOLATILE,
                    kind=ctypes.c_ulonglong,
                )
                for index, handle in self._handles.items()
            }  # fmt: skip
        return self._gpus, tuple(self._sample(*one) for one in self._handles.items())

    def _sample(self, index: int, handle: ctypes.c_void_p) -> GpuSample:
        use = self._get(_UTILIZATION(), "nvmlDeviceGetUtilizationRates", handle)
        power = self._number("nvmlDeviceGetPowerUsage", handle)
        return GpuSample(
            None if use is None else float(use[0]),
            self._memory(handle)[0],
            power=None if power is None else power / 1000,
            temperature=self._number("nvmlDeviceGetTemperature", handle, _TEMPERATURE_GPU),
            sm_clock=self._number("nvmlDeviceGetClockInfo", handle, _CLOCK_SM),
            memory_clock=self._number("nvmlDeviceGetClockInfo", handle, _CLOCK_MEMORY),
            ecc=self._ecc.get(index),
            xid=self._xids.get(handle.value, 0) if self._events is not None else None,
        )

    def _call(self, name: str, *arguments: Any) -> bool:
        """Call a function; return whether this driver has it, and it succeeds."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            return False
        return int(function(*arguments)) == 0

    def _get(self, result: Any, name: str, *arguments: Any) -> Any:
        """Return the result that a function writes through its last argument; None if it fails."""
        return result if self._call(name, *arguments, ctypes.byref(result)) else None

    def _number(
        self, name: str, handle: ctypes.c_void_p, *arguments: int, kind: Any = ctypes.c_uint
    ) -> int | None:
        value = self._get(kind(), name, handle, *arguments)
        return None if value is None else int(value.value)

    def _text(self, name: str, handle: ctypes.c_void_p) -> str:
        buffer = ctypes.create_string_buffer(_NAME_BYTES)
        self._call(name, handle, buffer, ctypes.c_uint(_NAME_BYTES))
        return buffer.value.decode(errors="replace")

    def _memory(self, handle: ctypes.c_void_p) -> tuple[int | None, int | None]:
        """Return the used and the total memory; nvidia-smi excludes the driver's reserve too."""
        second = self._get(_MEMORY_V2(_VERSION_2), "nvmlDeviceGetMemoryInfo_v2", handle)
        if second is not None:
            return second[4], second[1]
        first = self._get(_MEMORY(), "nvmlDeviceGetMemoryInfo", handle)
        return (None, None) if first is None else (first[2], first[0])

    def _watch_xids(self) -> ctypes.c_void_p | None:
        """Return a set of events of all GPUs; None if the driver does not report XIDs."""
        events: ctypes.c_void_p | None = self._get(ctypes.c_void_p(), "nvmlEventSetCreate")
        kind = ctypes.c_ulonglong(_EVENT_XID)
        watched = [
            self._call("nvmlDeviceRegisterEvents", handle, kind, events)
            for handle in self._handles.values()
        ]
        return events if any(watched) else None

    def _read_xids(self) -> None:
        event = _EVENT()
        for _ in range(_MAX_EVENTS if self._events is not None else 0):
            # Without a new event, it fails at once.
            if not self._call("nvmlEventSetWait_v2", self._events, ctypes.byref(event), 0):
                return
            if event[1] == _EVENT_XID:
                self._xids[event[0]] = event[2]


def amd_gpus(environ: Mapping[str, str], root: str = "") -> Callable[[], GpuState]:
    """Return a function that reads the AMD GPUs of the job from the files of the amdgpu driver.

    Args:
        environ: ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES select the GPUs, by index.
        root: replaces ``/`` in tests.

    Raises:
        OSError: there is no such GPU.
    """
    names = [name for name in _listed(f"{root}/sys/class/drm") if re.fullmatch(r"card\d+", name)]
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

    def sensor(name: str, unit: float) -> float | None:
        value = _number(hwmon / name)
        return None if value is None else value / unit

    power = sensor("power1_average", 1e6)  # from microwatts
    counts = files.read_text(board / "ras/umc_err_count", 200)
    errors = re.search(r"^ue: (\d+)", counts, re.MULTILINE)
    clocks = [sensor(f"freq{number}_input", 1e6) for number in (1, 2)]
    sm_clock, memory_clock = (None if clock is None else int(clock) for clock in clocks)
    return GpuSample(
        _number(board / "gpu_busy_percent"),
        _number(board / "mem_info_vram_used"),
        power=sensor("power1_input", 1e6) if power is None else power,
        temperature=sensor("temp1_input", 1000),
        sm_clock=sm_clock,
        memory_clock=memory_clock,
        ecc=int(errors[1]) if errors else None,
    )


def _word(board: Path, name: str) -> str:
    return files.read_text(board / name, 80).strip()
