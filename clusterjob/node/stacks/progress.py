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
5. **Its stack does not show its work**, and its main thread works by the same measures: a program
   that is not Python, or the import of an extension module. A worker that is stopped, or waits for
   a file system, does not work.

A main thread that spins in one call, such as a wait for a GPU, stands still. So does a long call
that computes. Such a program has to print a line or call ``ctx.heartbeat()`` now and then.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from clusterjob.node.stacks.grouping import RankStack, ThreadStack
from clusterjob.node.system import files, processes

# The functions of a thread, outermost first: pairs of file and name.
Functions = tuple[tuple[str, str], ...]
_WORKING_CPU = 0.1  # of one core
_WORKING_IO = 1e6  # bytes per second
_IMPORT = "<frozen importlib"  # the file of frames in which an extension module is loaded
_MIN_SAMPLES = 4  # samples after which a thread has a usual place
_MAX_PLACES = 256  # different places of a thread that are counted
_MAX_THREADS = 1000  # of a rank that are remembered: a program may start a new one for each step

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


def read_activity(pids: Iterable[int]) -> dict[int, Activity]:
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


@dataclass
class _Thread:
    """The places of a thread in the samples since the last output."""

    places: Counter[Functions] = field(default_factory=Counter)
    last: Functions = ()
    away: bool = False  # whether it was not at its usual place in the last sample

    def works(self, place: Functions) -> bool:
        """Record a sample; return whether the thread works."""
        if len(self.places) < _MAX_PLACES or place in self.places:
            self.places[place] += 1
        samples = sum(self.places.values())
        away = samples >= _MIN_SAMPLES and 2 * self.places[place] < samples
        working = away and self.away and place != self.last
        self.last, self.away = place, away
        return working


@dataclass
class _Rank:
    """The last sample of one rank."""

    pid: int
    main: Functions | None = None
    threads: dict[str, _Thread] = field(default_factory=dict)


class Progress:
    """Compare samples of the ranks of one node."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._now: dict[int, Activity] = {}  # before this sample
        self._last: dict[int, Activity] = {}  # before the last sample
        self._after: dict[int, Activity] = {}  # after the last sample
        self._read_at = self._elapsed = 0.0

    def begin(self) -> None:
        """Read the workers' counters; call this before each sample, which changes them."""
        self._last = self._now
        self._now = read_activity(rank.pid for rank in self._ranks.values())
        moment = time.monotonic()
        self._elapsed, self._read_at = moment - self._read_at, moment

    def moved(self, stacks: Iterable[RankStack], *, first: bool) -> bool:
        """Record a sample, and return whether a rank has moved since the last one.

        Args:
            stacks: the stacks of the living ranks.
            first: whether earlier samples are to be forgotten.
        """
        if first:
            self._ranks.clear()
        found = {stack.rank: stack for stack in stacks}
        news = [self._record(stack) for stack in found.values()]
        self._ranks = {rank: known for rank, known in self._ranks.items() if rank in found}
        self._after = read_activity(rank.pid for rank in self._ranks.values())
        self._now = self._after | self._now  # new ranks have no counters yet
        # Without a rank, such as before torchrun has started its workers, nothing stands still.
        return not first and (any(news) or not found)

    def _record(self, stack: RankStack) -> bool:
        rank = self._ranks.get(stack.rank)
        if rank is None or rank.pid != stack.pid:
            self._ranks[stack.rank] = rank = _Rank(stack.pid)
            moved = True
        else:
            moved = self._used(rank.pid, hidden=_is_hidden(stack))
        for index, thread in enumerate(stack.threads):
            place = _functions(thread)
            if index == 0:
                if not stack.answered:
                    continue  # a machine under load answers late
                moved |= rank.main is not None and _differ(rank.main, place)
                rank.main = _deeper(rank.main, place)
            elif not thread.name.startswith("clusterjob"):
                known = rank.threads.setdefault(f"{index} {thread.name}", _Thread())
                moved |= known.works(place)
        if len(rank.threads) > _MAX_THREADS:
            now = {f"{index} {thread.name}" for index, thread in enumerate(stack.threads)}
            rank.threads = {name: known for name, known in rank.threads.items() if name in now}
        return moved

    def _used(self, pid: int, *, hidden: bool) -> bool:
        """Return whether a worker has read or written, or the processes below it have worked.

        Args:
            pid: the worker.
            hidden: whether its stack does not show whether it works.
        """
        old, after, new = (found.get(pid) for found in (self._last, self._after, self._now))
        if old is None or after is None or new is None:
            return False
        if new.written > after.written or new.io > old.io:
            return True
        cpu, io = _WORKING_CPU * self._elapsed, _WORKING_IO * self._elapsed
        below = new.below_cpu - old.below_cpu > cpu or new.below_io - old.below_io > io
        below |= new.below_runs and old.below_runs
        own = hidden and (new.cpu - old.cpu > cpu or (new.runs and old.runs))
        return below or own


def _is_hidden(stack: RankStack) -> bool:
    main = stack.main_frames
    return not main or main[0].file.startswith(_IMPORT)


def _functions(thread: ThreadStack) -> Functions:
    return tuple((frame.file, frame.function) for frame in reversed(thread.frames))


def _differ(old: Functions, new: Functions) -> bool:
    """Return whether neither place is inside the other."""
    common = min(len(old), len(new))
    return old[:common] != new[:common]


def _deeper(old: Functions | None, new: Functions) -> Functions:
    """Return the deeper of two places if one is inside the other, else the new one."""
    return old if old is not None and len(old) > len(new) and not _differ(old, new) else new
