"""Tell from samples of the stacks whether the workers of a node move.

A worker moves between two samples if one of these holds:

1. **Its main thread is in another function.** Lines do not count, so a loop that only computes
   stands still. Neither does a deeper or shallower call of the same function, so a loop that
   calls one function to wait stands still too.
2. **Its main thread has read or written something**, or torch's thread that takes batches from a
   DataLoader has: a batch arrives, a checkpoint is written. Other threads do not count, because a
   monitor reads files all the time.
3. **The processes below it work**: a compiler, the workers of a DataLoader. They use a tenth of a
   core, or read and write 1 MB/s, or run in two samples in a row, as on a busy machine. A monitor
   uses less.
4. **Another thread works**: in this sample and in the one before, it was in two different
   functions, and in neither of them for half of the samples. A thread with a usual place, such as
   a monitor that wakes up once per second, only waits there.
5. **Its stack did not show its work**, and its main thread works by the same measures: a program
   that is not Python, or the import of an extension module. A worker that is stopped, or waits for
   a file system, does not work.

A main thread that spins in one call, such as a wait for a GPU, stands still. So does a long call
that computes. Such a program has to print a line or call ``ctx.heartbeat()`` now and then.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from clusterjob.node.stacks.grouping import RankStack, ThreadStack
from clusterjob.node.system import files, processes

# The functions of a thread, outermost first: pairs of file and name.
Functions = tuple[tuple[str, str], ...]
Places = deque[Functions]  # of one thread in the last samples
_WORKING_CPU = 0.1  # of one core
_WORKING_IO = 1e6  # bytes per second
_IMPORT = "<frozen importlib"  # the file of frames in which an extension module is loaded
_MIN_SAMPLES, _MAX_SAMPLES = 4, 60  # samples that give a thread's usual place

_TICKS = os.sysconf("SC_CLK_TCK")
# torch names the thread that takes batches from the workers of a DataLoader.
_LOADER_THREAD = "pt_data"
# Fields of /proc/PID/stat, counted from the state: utime and stime, cutime and cstime.
_OWN, _REAPED = slice(11, 13), slice(13, 15)
# Sources: proc(5), /proc/PID/task/TID/io and /proc/PID/stat.


@dataclass(frozen=True)
class Activity:
    """The counters of one worker, which only grow, and who runs at the moment.

    Attributes:
        io: bytes that its main thread, and torch's thread that takes batches, have read and
            written. Other threads do not count: a monitor reads files all the time.
        cpu: seconds of CPU time of the processes below the worker; those that have ended count too.
            If the worker's stack does not show its work, its main thread counts as one of them.
        below_io: bytes that they have read and written.
        runs: whether one of them runs, or waits for a core.
    """

    io: int
    cpu: float
    below_io: int
    runs: bool


def read_activity(workers: Mapping[int, bool]) -> dict[int, Activity]:
    """Return the counters of those workers that live, by pid.

    Args:
        workers: whether the stack of each does not show its work, by pid.
    """
    stats = processes.running()
    children = processes.children(stats)
    return {
        pid: _of_worker(pid, stats, processes.below(pid, children), hidden=hidden)
        for pid, hidden in workers.items()
        if pid in stats
    }


def _of_worker(
    pid: int, stats: Mapping[int, list[str]], below: list[int], *, hidden: bool
) -> Activity:
    tasks = f"/proc/{pid}/task"
    main = files.read_text(f"{tasks}/{pid}/stat").rpartition(")")[2].split() if hidden else []
    ticks = [*stats[pid][_REAPED], *main[_OWN]]
    for each in below:
        ticks += [*stats[each][_OWN], *stats[each][_REAPED]]
    return Activity(
        io=sum(
            _io(f"{tasks}/{thread}/io")
            for thread in files.listed(tasks)
            if thread == str(pid)
            or files.read_text(f"{tasks}/{thread}/comm").startswith(_LOADER_THREAD)
        ),
        cpu=sum(map(int, ticks)) / _TICKS,
        below_io=sum(_io(f"/proc/{each}/io") for each in below),
        runs=main[:1] == ["R"] or any(stats[each][0] == "R" for each in below),
    )


def _io(path: str) -> int:
    """Return the bytes that were read and written.

    A call counts when it returns. During a long call, the bytes from and to disks grow.
    """
    counts = dict(line.partition(": ")[::2] for line in files.read_text(path).splitlines())
    return sum(int(counts.get(name, 0)) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))


@dataclass
class _Worker:
    """The last sample of one worker."""

    main: Functions = ()
    hidden: bool = False  # whether its stack does not show its work
    places: dict[str, Places] = field(default_factory=dict)  # of its other threads


class Progress:
    """Compare samples of the ranks of one node."""

    def __init__(self) -> None:
        self._workers: dict[int, _Worker] = {}  # by pid
        self._last: dict[int, Activity] = {}  # after the last sample, which adds to the counters
        self._last_at = 0.0

    def sample(self, take: Callable[[], Iterable[RankStack]]) -> bool:
        """Take a sample, and return whether a rank has moved since the last one, or is new.

        Args:
            take: returns the stacks of the living ranks.
        """
        now = read_activity(self._hidden())
        seconds = time.monotonic() - self._last_at
        worked = {
            pid for pid, each in now.items()
            if pid in self._last and _has_worked(self._last[pid], each, seconds)
        }  # fmt: skip
        found = {stack.pid: stack for stack in take()}
        new = found.keys() - self._workers.keys()
        self._workers = {pid: self._workers.get(pid) or _Worker() for pid in found}
        moved = {pid for pid, stack in found.items() if self._has_moved(self._workers[pid], stack)}
        self._last, self._last_at = read_activity(self._hidden()), time.monotonic()
        # Without a rank nothing stands still.
        return bool(moved | new | (worked & found.keys())) or not found

    def _hidden(self) -> dict[int, bool]:
        return {pid: worker.hidden for pid, worker in self._workers.items()}

    def _has_moved(self, worker: _Worker, stack: RankStack) -> bool:
        """Record a sample; return whether the worker is in other functions than in the last one."""
        frames = stack.main_frames
        worker.hidden = not frames or frames[0].file.startswith(_IMPORT)
        if not frames:
            return False  # a machine under load answers late
        main = _functions(stack.threads[0])
        common = min(len(worker.main), len(main))
        moved = worker.main[:common] != main[:common]  # neither place is inside the other
        if moved or len(main) > len(worker.main):
            worker.main = main  # the deeper one of two places of which one is inside the other
        earlier, worker.places = worker.places, {}
        for index, thread in enumerate(stack.threads[1:]):
            if not thread.name.startswith("clusterjob"):
                key = f"{index} {thread.name}"
                places = worker.places[key] = earlier.get(key) or deque(maxlen=_MAX_SAMPLES)
                was_away = _is_away(places)
                places.append(_functions(thread))
                moved |= was_away and _is_away(places) and places[-1] != places[-2]
        return moved


def _is_away(places: Places) -> bool:
    """Return whether a thread was not at its usual place in the last sample."""
    count = len(places)
    return count >= _MIN_SAMPLES and 2 * places.count(places[-1]) < count


def _has_worked(old: Activity, new: Activity, seconds: float) -> bool:
    return (
        new.io > old.io
        or new.cpu - old.cpu > _WORKING_CPU * seconds
        or new.below_io - old.below_io > _WORKING_IO * seconds
        or (new.runs and old.runs)
    )


def _functions(thread: ThreadStack) -> Functions:
    return tuple((frame.file, frame.function) for frame in reversed(thread.frames))
