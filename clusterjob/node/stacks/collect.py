"""Collect the stacks of all ranks of one node at once, from any process of the same user.

The steps for one process, which must have called `offer`:

1. If its main thread runs, Python code of it writes all stacks.
2. Else each thread gets one signal, the main thread first, and faulthandler writes its stack. Only
   so are threads known that work while the main thread waits for them; `progress` needs them.
3. py-spy reads the memory of a process that does not answer, where py-spy is installed and allowed.
4. Else the process has no answer after `ANSWER_SECONDS`, and its kernel state is shown.

A thread that waits for a file system is not asked: a signal would interrupt its read, and some
libraries take that for an error. Nor is any thread after one that answers late: both would write
into the same file.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from clusterjob.node.job_processes import NodeProcesses
from clusterjob.node.stacks import grouping, offer
from clusterjob.node.stacks.grouping import (
    MAX_FRAMES,
    MAX_TEXT,
    MAX_THREADS,
    STOPPED,
    Frame,
    RankStack,
    ThreadStack,
)
from clusterjob.node.system import files, processes

# Seconds for a process to answer; with a free core a thread needs less than a millisecond.
ANSWER_SECONDS = 1.0
POLL_SECONDS = 0.01  # between two calls of `StackRequest.step` without progress
_SHORT_POLL = 0.0005  # seconds; the pause grows up to `POLL_SECONDS`
_PYTHON_SECONDS = 0.4  # for the main thread to run Python code; else it is in native code
_SLICE = 0.05  # seconds for each other thread
_MAX_RANKS = 256
_MAX_ASKED = 1000  # threads
_MAX_BYTES = 1 << 18
_HEADER = "Stack (most recent call first):"
# The number of the system call tgkill(2), by CPU architecture; C libraries may lack the function.
_TGKILL = {"x86_64": 234, "aarch64": 131, "ppc64le": 250, "s390x": 241, "riscv64": 131}
_PY_SPY_SECONDS = 0.5  # at the end of the timeout, for ranks that do not answer
_PY_SPY_BYTES = 16 << 20
_PY_SPY_AT_ONCE = 16  # processes
_STATES = {
    "R": "runs", "S": "sleeps", "D": "waits for a disk or a file system",
    "T": "is stopped", "t": "is being traced", "Z": "has ended", "X": "has ended",
}  # fmt: skip
# Kernel functions in which a read of a FUSE file system waits, and a signal interrupts it.
_FUSE_WAITS = ("request_wait_answer", "__fuse_request_send", "fuse_dev_do_write")
_ENDED = "has ended"


def state_of(pid: int) -> str:
    """Return the state of a process's main thread, such as ``sleeps (hrtimer_nanosleep)``."""
    fields = processes.stat_fields(pid)
    text = _ENDED if fields is None else _STATES.get(fields[0], "is about to end")
    if text == _ENDED:
        return text
    channel = files.read_text(f"/proc/{pid}/wchan").strip()
    return f"{text} ({channel})" if channel.strip("0") else text


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, in any language."""
    status = files.read_text(f"/proc/{pid}/status")
    caught = status.partition("\nSigCgt:")[2].partition("\n")[0]
    return bool(int(caught.strip() or "0", 16) >> (number - 1) & 1)


def _waits_for_files(tid: int) -> bool:
    """Return whether a thread waits for a file system, which a signal or ptrace disturbs."""
    text = state_of(tid)
    return text.startswith(_STATES["D"]) or text.endswith(
        tuple(f"({name})" for name in _FUSE_WAITS)
    )


def collect(
    found: NodeProcesses,
    node_rank: int,
    timeout: float,
    *,
    rank: int | None = None,
    native: bool = False,
    warn: Callable[[str], None] = lambda _: None,
) -> list[RankStack]:
    """Return the stacks of the living ranks of a node, in the order of ranks.

    Args:
        found: the processes of the node.
        node_rank: the node's rank.
        timeout: timeout for all ranks, in seconds. A rank that does not answer in time is
            returned with its kernel state.
        rank: the only rank to ask; None for all.
        native: whether py-spy adds the frames of C and C++; this stops the process for a moment.
        warn: called with one line if the native frames cannot be had.
    """
    asked = [each for each in living(found) if rank in (None, each[0])]
    return of_ranks(asked, node_rank, timeout, native=native, warn=warn)


def living(found: NodeProcesses) -> list[tuple[int, int]]:
    """Return the rank and the pid of each rank of a node that has not ended."""
    pids = []
    for each in found.ranks:
        fields = processes.stat_fields(each.pid)
        # The forkserver's table has workers that have ended: their pids may be used again.
        own = fields is not None and found.parent in (None, int(fields[1]))
        if each.rank is not None and own:
            pids.append((each.rank, each.pid))
    return pids[:_MAX_RANKS]


def of_ranks(
    ranks: Iterable[tuple[int, int]],
    node_rank: int,
    timeout: float,
    *,
    native: bool = False,
    warn: Callable[[str], None] = lambda _: None,
) -> list[RankStack]:
    """Return the stacks of some processes of this machine.

    Args:
        ranks: (rank, pid) of each.
        node_rank: the node's rank.
        timeout: timeout for all ranks, in seconds.
        native: as in `collect`.
        warn: as in `collect`.
    """
    end = time.monotonic() + timeout
    asked = []
    for rank, pid in ranks:
        request = _request(pid)
        state = state_of(request.pid)
        # A stopped process would answer when it continues, and an ended one never.
        if state.startswith((*STOPPED, _ENDED)):
            request.close()
        asked.append((rank, request, state))
    _wait([request for _, request, _ in asked], end - min(_PY_SPY_SECONDS, timeout / 4))
    found = {request.pid: request.answer() for _, request, _ in asked}
    # Of a rank that does not answer, the state now.
    states = {
        request.pid: state if _is_known(found[request.pid]) else state_of(request.pid)
        for _, request, state in asked
    }
    silent = [pid for pid, threads in found.items() if not _is_known(threads)]
    dumps = _py_spy([pid for pid in silent if states[pid] != _ENDED], end)
    if native:
        alive = [pid for pid in found if states[pid] != _ENDED]
        wanted = [
            pid
            for pid in alive
            if not states[pid].startswith(STOPPED) and not any(map(_waits_for_files, _threads(pid)))
        ]
        if wanted != alive:  # ptrace would disturb them
            warn("no native frames of a process that is stopped or waits for a file system")
        whole = _py_spy(wanted, max(end, time.monotonic() + _PY_SPY_SECONDS), "--native")
        if not all(_is_known(whole[pid]) for pid in wanted):
            warn(_no_native_frames(wanted))
        dumps |= {pid: threads for pid, threads in whole.items() if _is_known(threads)}
    found |= {pid: threads for pid, threads in dumps.items() if _is_known(threads)}
    host = socket.gethostname()
    return [
        RankStack(
            rank,
            node_rank,
            host,
            request.pid,
            state=states[request.pid],
            answered=_is_known(found[request.pid]),
            threads=tuple(
                thread
                for index, thread in enumerate(found[request.pid].values())
                if thread.frames or not index
            ),
        )
        for rank, request, _ in asked
    ]


def _is_known(threads: Mapping[int, ThreadStack]) -> bool:
    """Return whether the stack of the main thread is known, which is the first one."""
    return any(thread.frames for thread in itertools.islice(threads.values(), 1))


def _request(pid: int) -> StackRequest:
    """Ask a rank's process, or the nearest process below it that offers its stacks.

    The rank may be a shell or another program that runs Python.
    """
    request = StackRequest(pid)
    if request.offered:
        return request
    for below in processes.descendants(pid):
        other = StackRequest(below)
        if other.offered:
            request.close()
            return other
        other.close()
    return request


def _wait(requests: list[StackRequest], end: float) -> None:
    """Advance the requests until all are done, or the time has passed."""
    pause = _SHORT_POLL
    while time.monotonic() < end:
        left = [request for request in requests if not request.done]
        if not left:
            return
        # Not any(): each request must advance.
        if sum(request.step() for request in left):
            pause = _SHORT_POLL
        else:
            time.sleep(min(pause, max(0.0, end - time.monotonic())))
            pause = min(2 * pause, POLL_SECONDS)


class _Signals(NamedTuple):
    """Whether `offer.SIGNAL` is pending for a thread, and blocked; whether the thread sleeps."""

    pending: bool
    blocked: bool
    sleeps: bool


class StackRequest:
    """A request for the stacks of one process; call `step` until `done`, then `answer`.

    Args:
        pid: the process.

    Attributes:
        offered: whether the process offers its stacks.
        done: whether all threads have answered that can answer.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._name = ""
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._name, self._file = _open_offer(pid, offer.SIGNAL)
        self.offered = self._file is not None
        self.done = not self.offered
        self._found: dict[int, str] = {}
        self._steps = self._ask()

    def step(self) -> bool:
        """Collect what has been written; return whether a thread has answered."""
        if self.done:
            return False
        try:
            return next(self._steps)
        except (StopIteration, OSError):  # the process may have ended
            self.close()
            return True

    def answer(self) -> dict[int, ThreadStack]:
        """Return the stacks by thread id, the main thread's first, and close the request.

        If the main thread has not answered, its stack has no frames.
        """
        self.close()
        main = _comm(self.pid, self.pid)
        threads = {self.pid: ThreadStack("MainThread", ())} if self._found else {}
        for tid in sorted(self._found, key=lambda tid: (tid != self.pid, tid))[:MAX_THREADS]:
            comm = _comm(self.pid, tid)
            name = comm if comm != main and comm else f"thread {tid}"
            threads[tid] = grouping.parse_thread(
                "MainThread" if tid == self.pid else name, self._found[tid]
            )
        return threads

    def close(self) -> None:
        """End the request, so that the next one can lock the file."""
        self._steps.close()
        if self._file is not None:
            os.close(self._file)
        self._file = None
        self.done = True

    def _ask(self) -> Generator[bool, None, None]:
        """Ask the threads; yield False while waiting, True after each answer."""
        assert self._file is not None
        while not _lock(self._file):
            yield False
        end = time.monotonic() + ANSWER_SECONDS
        main = _signals(self.pid, self.pid)
        is_native = False
        if main is not None and not main.sleeps:
            is_native = yield from self._ask_python()
        if self._found:
            return
        tids = sorted(_threads(self.pid), key=lambda tid: (tid != self.pid, tid))
        for tid in tids[:_MAX_ASKED]:
            if not (yield from self._ask_thread(tid, end, is_native=is_native)):
                return
            yield True

    def _ask_python(self) -> Generator[bool, None, bool]:
        """Let Python code of the main thread write all stacks; return whether it does not run."""
        try:
            _, file = _open_offer(self.pid, offer.SIGNAL_FOR_PYTHON)
        except OSError:
            return False
        try:
            os.ftruncate(file, 0)
            os.pwrite(file, b"?", 0)
            _signal_thread(self.pid, self.pid, offer.SIGNAL_FOR_PYTHON)
            end = time.monotonic() + _PYTHON_SECONDS
            while time.monotonic() < end:
                written = os.pread(file, _MAX_BYTES, 0).decode(errors="replace")
                text, complete, _ = written.partition(offer.END)
                if complete:
                    self._found = grouping.of_all_threads(text[1:])
                    return False
                yield False
            os.ftruncate(file, 0)  # a late handler then writes nothing
        finally:
            os.close(file)
        return True

    def _ask_thread(self, tid: int, end: float, *, is_native: bool) -> Generator[bool, None, bool]:
        """Let a thread write its stack; return False if it may still write later."""
        assert self._file is not None
        is_main = tid == self.pid
        late = min(end, time.monotonic() + (_PYTHON_SECONDS if is_main else _SLICE))
        while True:
            signals = _signals(self.pid, tid)
            if signals is None:
                return True
            can_answer = not (signals.pending or signals.blocked or _waits_for_files(tid))
            if can_answer and ((is_main and is_native) or self._is_safe(tid, signals)):
                break
            if time.monotonic() >= late:
                return not signals.pending
            yield False
        os.ftruncate(self._file, 0)
        if not _signal_thread(self.pid, tid, offer.SIGNAL):
            return True
        late = end if is_main else min(end, time.monotonic() + _SLICE)
        while True:
            # The size first: a thread blocks the signal until it has written all.
            begun = os.fstat(self._file).st_size > 0
            signals = _signals(self.pid, tid)
            if signals is None:
                return True
            answered = not (signals.pending or signals.blocked)
            if answered and begun:
                text = os.pread(self._file, _MAX_BYTES, 0).decode(errors="replace")
                if text.startswith(_HEADER) and text.count(_HEADER) == 1:
                    self._found[tid] = text
                return True
            # A native thread writes nothing.
            if answered and signals.sleeps and not os.fstat(self._file).st_size:
                return True
            if time.monotonic() >= late:
                return answered
            yield False

    def _is_safe(self, tid: int, signals: _Signals) -> bool:
        """Return whether the process cannot crash if this thread is asked now; see `offer`."""
        if offer.ASLEEP in self._name:
            return signals.sleeps
        others = _threads(self.pid) if offer.ALONE in self._name else []
        return not any(
            other != tid and (fields := processes.stat_fields(other)) and fields[0] == "R"
            for other in others
        )


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_offer(pid: int, number: int) -> tuple[str, int]:
    """Open the file of a process that offers its stacks, and catches the signal.

    Raises:
        OSError: the process does not, or it has ended.
    """
    if not catches(pid, number):
        raise FileNotFoundError(f"process {pid} does not catch signal {number}")
    file = offer.FILES[number]
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        with contextlib.suppress(FileNotFoundError):
            link = os.readlink(path).rpartition("/")[2]
            # The file is in no directory: another file of this name must not be truncated.
            if link.startswith((file, f"memfd:{file}")) and os.stat(path).st_nlink == 0:
                return link, os.open(path, os.O_RDWR | os.O_CLOEXEC)
    raise FileNotFoundError(f"process {pid} has no file {file}")


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _comm(pid: int, tid: int) -> str:
    return files.read_text(f"/proc/{pid}/task/{tid}/comm").strip()


def _signals(pid: int, tid: int) -> _Signals | None:
    """Return the state of `offer.SIGNAL` in a thread; None if the thread has ended."""
    bit = 1 << (offer.SIGNAL - 1)
    status = files.read_text(f"/proc/{pid}/task/{tid}/status")
    values = dict(re.findall(r"^(State|SigPnd|SigBlk):\s*(\S+)", status, re.MULTILINE))
    if "SigBlk" not in values or values["State"] in "ZX":
        return None
    return _Signals(
        bool(int(values["SigPnd"], 16) & bit),
        bool(int(values["SigBlk"], 16) & bit),
        values["State"] in "SD",
    )


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _signal_thread(pid: int, tid: int, signal: int) -> bool:
    """Send a signal to one thread; return False if it has ended, or on an unknown CPU."""
    number = _TGKILL.get(os.uname().machine)
    if number is None:
        return False
    return bool(_libc().syscall(ctypes.c_long(number), pid, tid, signal) == 0)


def _py_spy(pids: Sequence[int], end: float, *options: str) -> dict[int, dict[int, ThreadStack]]:
    """Return the stacks that py-spy reads, by pid and thread id; empty where it fails.

    py-spy reads the memory of a running process: without --native it neither stops the process nor
    needs its help.

    Args:
        pids: the processes.
        end: the monotonic time after which py-spy is ended.
        options: ``--native``.
    """
    from concurrent.futures import ThreadPoolExecutor  # seldom needed

    with ThreadPoolExecutor(_PY_SPY_AT_ONCE) as pool:
        found = pool.map(lambda pid: _py_spy_dump(pid, end, options), pids)
        return dict(zip(pids, found, strict=True))


def _py_spy_dump(pid: int, end: float, options: Sequence[str]) -> dict[int, ThreadStack]:
    program = _py_spy_path(pid)
    left = end - time.monotonic()
    if program is None or left <= 0:
        return {}
    try:
        done = subprocess.run(
            [program, "dump", "--json", *(options or ("--nonblocking",)), "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
            timeout=left,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_py_spy(done.stdout[:_PY_SPY_BYTES], pid)


def _py_spy_path(pid: int) -> str | None:
    """Return the path of py-spy: on the PATH of the process, or on this process's."""
    own = ""
    with contextlib.suppress(OSError):
        # A worker that has become another user may have changed its environment.
        if os.stat(f"/proc/{pid}").st_uid == os.geteuid():
            own = processes.environment_of(pid).get("PATH", "")
    return shutil.which("py-spy", path=own) or shutil.which("py-spy")


def _no_native_frames(pids: Iterable[int]) -> str:
    if any(_py_spy_path(pid) is None for pid in pids):
        return "no native frames: py-spy is not installed; pip install py-spy"
    return "no native frames: py-spy failed; see ptrace_scope, or the container's rights"


def parse_py_spy(data: bytes, pid: int) -> dict[int, ThreadStack]:
    """Return the threads of py-spy's JSON, the main thread first; none if it is malformed."""
    found: dict[int, Any] = {}
    try:
        for thread in json.loads(data)[:MAX_THREADS]:
            tid = int(thread["os_thread_id"] or 0)
            name = thread["thread_name"] or ("MainThread" if tid == pid else f"thread {tid}")
            shown = [_frame(each) for each in thread["frames"][:MAX_FRAMES]]
            python = [index for index, each in enumerate(shown) if each.line is not None]
            # Below the outermost Python frame are those of the interpreter's start.
            whole = shown[: python[-1] + 1] if python else shown
            found[tid] = ThreadStack(str(name)[:MAX_TEXT], grouping.of_program(whole))
    except (ValueError, LookupError, TypeError, RecursionError, OverflowError):
        return {}
    return {tid: found[tid] for tid in sorted(found, key=lambda tid: (tid != pid, tid))}


def _frame(frame: dict[str, Any]) -> Frame:
    line = frame["line"]
    native = bool(frame["module"])  # with debug information, it has a line of a file in C
    return Frame(
        str(frame["filename"] or frame["module"] or "???")[:MAX_TEXT],
        line if type(line) is int and 0 < line < 10**9 and not native else None,
        str(frame["name"])[:MAX_TEXT],
    )
