"""Measure the CPU time, memory, I/O and threads of each worker, with the processes below it.

Sources: proc(5). The CPU time and I/O of a child that was reaped are in the counters of its parent,
so that the sums over a worker's processes never lose them. The thread of the PSS is separate:
reading smaps_rollup takes long for a large process, and waits while the process's memory map is
locked.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from clusterjob.node.metrics.background import Background
from clusterjob.node.metrics.samples import WorkerSample
from clusterjob.node.system import processes

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PSS_PAUSE = 60.0  # minimum seconds between two readings
_PSS_SHARE = 2000  # a reading that took t seconds is repeated after this many times t
_PSS_LARGEST = 32 << 30  # bytes of RSS: the reading of a larger process locks its memory too long
_PSS_FIRST = 8.0  # seconds: while workers start, they need the CPU


@dataclass
class _Counters:
    """The counters of a worker's processes, summed up."""

    cpu: float = 0.0  # seconds
    read: int = 0  # bytes
    written: int = 0
    rss: int = 0
    threads: int = 0
    started: float = float("inf")  # of its oldest process, seconds since boot


class WorkerUse:
    """Measure the workers of a node.

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
        counters = self._counters()
        if counters and self._pss is None:
            self._pss = Background(
                "pss",
                self._read_pss,
                pause=lambda took: max(_PSS_PAUSE, took * _PSS_SHARE),
                delay=_PSS_FIRST,
            )
        pss = self._pss.take() if self._pss is not None else None
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
        """End the thread."""
        if self._pss is not None:
            self._pss.stop()

    def _counters(self) -> dict[int, _Counters]:
        self._follow()
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
            read, written = _io(pid)
            sums.read += read
            sums.written += written
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
        if not workers:
            return
        now = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        new = {}
        for pid in now - self._seen:
            if (fields := processes.stat_fields(pid)) is not None:
                new[pid] = fields
        for pid in new:
            above = [pid]  # the new processes from this one upwards
            while above[-1] in new and above[-1] not in workers and above[-1] not in self._owners:
                above.append(int(new[above[-1]][1]))
            top = above[-1]
            rank = workers.get(top, self._owners.get(top, (None, ""))[0])
            if rank is not None:
                for each in above:
                    if each in new:
                        self._owners[each] = rank, new[each][19]
        self._seen = now

    def _read_pss(self) -> dict[int, int]:
        """Return the PSS of each worker in bytes, without those that have a large process."""
        found: dict[int, int] = {}
        unknown = set()
        for pid, (rank, _) in list(self._owners.items()):
            with contextlib.suppress(OSError, ValueError, IndexError):
                if int(_read(f"/proc/{pid}/statm").split()[1]) * _PAGE > _PSS_LARGEST:
                    unknown.add(rank)
                    continue
                pss = _read(f"/proc/{pid}/smaps_rollup").partition("\nPss:")[2].split()
                found[rank] = found.get(rank, 0) + int(pss[0]) * 1024
        return {rank: size for rank, size in found.items() if rank not in unknown}


def _io(pid: int) -> tuple[int, int]:
    """Return the bytes that a process has read from disks and written to them; 0 if unknown."""
    try:
        values = dict(line.split(": ") for line in _read(f"/proc/{pid}/io").splitlines())
        return int(values["read_bytes"]), int(values["write_bytes"])
    except (OSError, ValueError, KeyError):
        return 0, 0


def _read(path: str) -> str:
    with open(path, encoding="ascii") as stream:
        return stream.read()
