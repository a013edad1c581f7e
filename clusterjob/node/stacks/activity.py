"""Read what a worker and the processes below it have used: input, output and CPU time.

Sources: proc(5), /proc/PID/task/TID/io and /proc/PID/stat.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from clusterjob.node.system import files, processes

_TICKS = os.sysconf("SC_CLK_TCK")
# torch names the thread that takes batches from the workers of a DataLoader.
_LOADER_THREAD = "pt_data"
# Fields of /proc/PID/stat, counted from the state: utime and stime, cutime and cstime.
_OWN, _REAPED = slice(11, 13), slice(13, 15)


@dataclass(frozen=True)
class Activity:
    """The counters of one worker, which only grow, and who runs at the moment.

    Attributes:
        io: bytes that its main thread, and torch's thread that takes batches, have read, and
            written to disks. Other threads do not count: a monitor reads files all the time.
        written: bytes that they have written by system calls. A sample of the stacks adds to it:
            each thread writes its stack.
        cpu: seconds of CPU time of the main thread.
        runs: whether the main thread runs, or waits for a core.
        below_io: bytes that the processes below the worker have read and written.
        below_cpu: their seconds of CPU time; processes that have ended count too.
        below_runs: whether one of them runs, or waits for a core.
    """

    io: int
    written: int
    cpu: float
    runs: bool
    below_io: int
    below_cpu: float
    below_runs: bool


def read(pids: Iterable[int]) -> dict[int, Activity]:
    """Return the counters of those workers that live, by pid."""
    stats = processes.running()
    children = processes.children(stats)
    return {
        pid: _of_worker(pid, stats, processes.below(pid, children)) for pid in pids if pid in stats
    }


def _of_worker(pid: int, stats: Mapping[int, list[str]], below: list[int]) -> Activity:
    tasks = f"/proc/{pid}/task"
    threads = [str(pid), *_loader_threads(tasks, pid)]
    counts = [_io(f"{tasks}/{thread}/io") for thread in threads]
    main = files.read_text(f"{tasks}/{pid}/stat").rpartition(")")[2].split()
    return Activity(
        io=sum(each - written for each, written in counts),
        written=sum(written for _, written in counts),
        cpu=_seconds(main[_OWN]),
        runs=main[:1] == ["R"],
        below_io=sum(_io(f"/proc/{each}/io")[0] for each in below),
        below_cpu=_seconds(stats[pid][_REAPED])
        + sum(_seconds(stats[each][_OWN]) + _seconds(stats[each][_REAPED]) for each in below),
        below_runs=any(stats[each][0] == "R" for each in below),
    )


def _loader_threads(tasks: str, pid: int) -> list[str]:
    try:
        threads = os.listdir(tasks)
    except OSError:
        return []
    return [
        thread
        for thread in threads
        if thread != str(pid)
        and files.read_text(f"{tasks}/{thread}/comm").startswith(_LOADER_THREAD)
    ]


def _seconds(ticks: Iterable[str]) -> float:
    return sum(map(int, ticks)) / _TICKS


def _io(path: str) -> tuple[int, int]:
    """Return the bytes that were read and written, and those that calls have written.

    A call counts when it returns. During a long call, the bytes from and to disks grow.
    """
    counts = dict(line.partition(": ")[::2] for line in files.read_text(path).splitlines())
    written = int(counts.get("wchar", 0))
    others = sum(int(counts.get(name, 0)) for name in ("rchar", "read_bytes", "write_bytes"))
    return written + others, written
