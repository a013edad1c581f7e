"""Measure a machine: CPU, memory, load, network and disks.

The memory is that of the nearest control group with a limit, such as the job's under Slurm; without
one, it is that of the machine. Sources: proc(5), cgroups(7), and the kernel's cgroup-v2.rst and
iostats.rst.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clusterjob.node.system import files

_SECTOR = 512  # bytes; the unit of /proc/diskstats
_TICKS = os.sysconf("SC_CLK_TCK")
# Devices that are made of others, or of memory.
_VIRTUAL_DISK = re.compile(r"(loop|ram|zram|dm-|md|sr|nbd|drbd)")


@dataclass(frozen=True)
class MachineUse:
    """The fields of `Sample` that belong to the machine."""

    cpu: float
    memory: int
    load: float
    received: float
    sent: float
    read: float
    written: float


class Machine:
    """Measure the machine of this process; `root` replaces ``/`` in tests."""

    def __init__(self, root: str = "") -> None:
        self._root = root
        group = next(_limited_groups(root), None)
        self._group = group[0] if group is not None else None
        total = _meminfo(root).get("MemTotal", 0)
        self.memory = min(total or group[1], group[1]) if group is not None else total
        self._disks = {
            name
            for name in _listed(f"{root}/sys/block")
            if not _VIRTUAL_DISK.match(name)
        }  # fmt: skip
        network = f"{root}/sys/class/net"
        names = [name for name in _listed(network) if name != "lo"]
        # Bridges and tunnels would count the bytes of the devices below them again.
        physical = [name for name in names if os.path.exists(f"{network}/{name}/device")]
        self._interfaces = set(physical or names)
        infiniband = f"{root}/sys/class/infiniband"
        self._ports = [
            f"{infiniband}/{device}/ports/{port}/counters"
            for device in _listed(infiniband)
            for port in _listed(f"{infiniband}/{device}/ports")
        ]
        self._at = time.monotonic()
        self._last = self._counters()

    def sample(self) -> MachineUse:
        """Return what was used since the last call."""
        now, counters = time.monotonic(), self._counters()
        seconds = max(now - self._at, 0.01)
        rates = [
            max(0.0, (new - old) / seconds) for new, old in zip(counters, self._last, strict=True)
        ]
        self._at, self._last = now, counters
        load = files.read_text(f"{self._root}/proc/loadavg").split()
        return MachineUse(
            100 * rates[0],
            self._used(),
            load=float(load[0]) if load else 0.0,
            received=rates[1],
            sent=rates[2],
            read=rates[3],
            written=rates[4],
        )

    def _counters(self) -> tuple[float, int, int, int, int]:
        """Return seconds of CPU, and bytes received, sent, read and written."""
        busy = 0
        first = files.read_text(f"{self._root}/proc/stat", 400).split("\n", 1)[0].split()[1:9]
        for index, ticks in enumerate(first):
            if index not in (3, 4):  # idle and waiting for I/O
                busy += int(ticks)
        received = sent = read = written = 0
        for line in files.read_text(f"{self._root}/proc/net/dev").splitlines()[2:]:
            name, _, numbers = line.partition(":")
            if name.strip() in self._interfaces:
                fields = numbers.split()
                received += int(fields[0])
                sent += int(fields[8])
        for port in self._ports:  # RDMA bypasses the interfaces; the unit is 4 bytes
            received += 4 * _number(f"{port}/port_rcv_data")
            sent += 4 * _number(f"{port}/port_xmit_data")
        for line in files.read_text(f"{self._root}/proc/diskstats").splitlines():
            fields = line.split()
            if len(fields) > 9 and fields[2] in self._disks:
                read += int(fields[5]) * _SECTOR
                written += int(fields[9]) * _SECTOR
        return busy / _TICKS, received, sent, read, written

    def _used(self) -> int:
        if self._group is not None:
            for name in ("memory.current", "memory.usage_in_bytes"):
                if used := _number(self._group / name):
                    # The kernel drops this part of the page cache before it runs out of memory.
                    cache = re.search(
                        r"^(?:total_)?inactive_file (\d+)",
                        files.read_text(self._group / "memory.stat"),
                        re.MULTILINE,
                    )
                    return max(0, used - int(cache[1] if cache else 0))
        memory = _meminfo(self._root)
        return max(0, memory.get("MemTotal", 0) - memory.get("MemAvailable", 0))


def _limited_groups(root: str) -> Iterator[tuple[Path, int]]:
    """Yield the control groups of this process that limit its memory, the nearest first.

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
            limit = _number(each / name)
            if 0 < limit < 1 << 60:  # cgroup v1 writes a huge number for no limit
                yield each, limit
            if str(each) == top:
                break


def _meminfo(root: str) -> dict[str, int]:
    """Return the sizes of /proc/meminfo in bytes."""
    return {
        name: int(size) * 1024
        for name, size in re.findall(
            r"^(\w+): +(\d+) kB", files.read_text(f"{root}/proc/meminfo"), re.MULTILINE
        )
    }


def _number(path: Path | str) -> int:
    text = files.read_text(path, 40).strip()
    return int(text) if text.isdecimal() else 0


def _listed(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
