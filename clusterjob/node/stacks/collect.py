"""Collect the stacks of all ranks of one node at once, from any process of the same user.

The steps for one process, which must have called `offer`; only its main thread gets a signal:

1. Python code of the main thread writes the stacks of all threads.
2. If the main thread is in native code, faulthandler writes its stack alone.
3. py-spy reads the memory of a process that does not answer, where py-spy is installed and allowed.
4. Else the process has no answer after `ANSWER_SECONDS`, and its kernel state is shown.

A main thread that waits for a file system is not asked: a signal would interrupt its read, and some
libraries take that for an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

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

# Seconds for a process to answer; with a free core it needs less than a millisecond.
ANSWER_SECONDS = 1.0
POLL_SECONDS = 0.002  # between two looks at the requests
# A request for the stacks of one process; see `ask`.
Request = Generator["tuple[ThreadStack, ...] | None", None, None]
# Seconds after which a main thread that sleeps, or runs, and has not run its Python handler is in
# native code.
_SLEEPING_SECONDS, _RUNNING_SECONDS = 0.02, 0.4
_MAX_RANKS = 256
_MAX_BYTES = 16 << 20  # of an answer
_PY_SPY_SECONDS = 0.5  # at the end of the timeout, for ranks that do not answer
_PY_SPY_AT_ONCE = 16  # processes
_STATES = {
    "R": "runs", "S": "sleeps", "D": "waits for a disk or a file system",
    "T": "is stopped", "t": "is being traced", "Z": "has ended", "X": "has ended",
}  # fmt: skip
# Kernel functions in which a read of a FUSE file system waits, and a signal interrupts it.
_FUSE_WAITS = ("request_wait_answer", "__fuse_request_send", "fuse_dev_do_write")


def state_of(pid: int) -> str:
    """Return the state of a process's main thread, such as ``sleeps (hrtimer_nanosleep)``."""
    fields = processes.stat_fields(pid)
    text = _STATES.get(fields[0] if fields else "X", "is about to end")
    channel = files.read_text(f"/proc/{pid}/wchan").strip()
    return f"{text} ({channel})" if channel.strip("0") else text


def has_signal(pid: int, name: str, number: int) -> bool:
    """Return whether a signal is in a set of signals of a process.

    Args:
        pid: the process.
        name: the set's name in /proc/PID/status, such as ``SigCgt``: the signals with a handler, in
            any language. SigBlk is that of the main thread.
        number: the signal.
    """
    mask = files.read_text(f"/proc/{pid}/status").partition(f"\n{name}:")[2].partition("\n")[0]
    return bool(int(mask.strip() or "0", 16) >> (number - 1) & 1)


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
    end = time.monotonic() + timeout
    pids, asked = dict[int, int](), dict[int, Request]()
    for each in found.ranks[:_MAX_RANKS]:
        fields = processes.stat_fields(each.pid)
        # The forkserver's table has workers that have ended: their pids may be used again.
        own = fields is not None and found.forkserver in (None, int(fields[1]))
        if own and rank in (None, each.rank):
            pids[each.rank] = _offering(each.pid)
            asked[each.rank] = ask(pids[each.rank])
    answers: dict[int, tuple[ThreadStack, ...]] = {}
    while asked and time.monotonic() < end - min(_PY_SPY_SECONDS, timeout / 4):
        for number, request in list(asked.items()):
            if (threads := next(request, ())) is not None:
                answers[number] = threads
                del asked[number]
        time.sleep(POLL_SECONDS)
    for request in asked.values():
        request.close()
    host = socket.gethostname()
    stacks = []
    for number, pid in pids.items():
        threads = answers.get(number, ())
        known = bool(threads and threads[0].frames)
        stacks.append(RankStack(number, node_rank, host, pid, state_of(pid), known, threads))
    if not native and all(stack.answered for stack in stacks):
        return stacks
    from concurrent.futures import ThreadPoolExecutor  # seldom needed

    seconds = max(end - time.monotonic(), _PY_SPY_SECONDS)
    read = functools.partial(_with_py_spy, seconds=seconds, native=native, warn=warn)
    with ThreadPoolExecutor(_PY_SPY_AT_ONCE) as pool:
        return list(pool.map(read, stacks))


def _offering(pid: int) -> int:
    """Return a rank's process, or the nearest process below it that offers its stacks.

    The rank may be a shell or another program that runs Python.
    """
    below = [] if offers(pid) else processes.descendants(pid)
    return next(filter(offers, below), pid)


def offers(pid: int) -> bool:
    """Return whether a process offers its stacks."""
    with contextlib.suppress(OSError):
        return all(_offer_path(pid, number) for number in offer.FILES)
    return False


def ask(pid: int) -> Request:
    """Ask a process for its stacks: yield None while it has not answered, then its threads.

    The main thread's is the first; there are none without an answer.
    """
    threads: tuple[ThreadStack, ...] = ()
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):  # it may have ended
        opened = []
        for number in offer.FILES:
            opened.append(os.open(_offer_path(pid, number), os.O_RDWR | os.O_CLOEXEC))
            stack.callback(os.close, opened[-1])
        if state_of(pid).startswith(STOPPED):  # it would answer when it continues
            return
        while True:
            try:
                fcntl.flock(opened[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:  # another request is not done
                yield None
        end = time.monotonic() + ANSWER_SECONDS
        for threads in _steps(pid, *opened):
            if threads or time.monotonic() > end:
                break
            yield None
    yield threads


def _steps(pid: int, python: int, native: int) -> Iterator[tuple[ThreadStack, ...]]:
    """Yield nothing while a process has not answered, then its threads."""
    while _waits_for_files(pid):
        yield ()
    yield from _ask_python(pid, python)
    yield from _ask_native(pid, native)


def _ask_python(pid: int, file: int) -> Iterator[tuple[ThreadStack, ...]]:
    """Let Python code of the main thread write all stacks, unless it is in native code."""
    os.ftruncate(file, 0)
    os.pwrite(file, b"?", 0)
    os.kill(pid, offer.SIGNAL_FOR_PYTHON)
    begin = time.monotonic()
    while True:
        yield ()
        text = _read(file)
        if text.endswith(offer.END):
            yield grouping.parse_threads(text[1:])
        # A main thread without a core has not taken the signal.
        elif not has_signal(pid, "ShdPnd", offer.SIGNAL_FOR_PYTHON):
            sleeps = state_of(pid).startswith(_STATES["S"])
            if time.monotonic() > begin + (_SLEEPING_SECONDS if sleeps else _RUNNING_SECONDS):
                return


def _ask_native(pid: int, file: int) -> Iterator[tuple[ThreadStack, ...]]:
    """Let faulthandler write the stack of the main thread, which is in native code.

    The kernel gives a signal for a process to its main thread, unless that blocks it.
    """
    while has_signal(pid, "SigBlk", offer.SIGNAL):
        yield ()
    os.ftruncate(file, 0)
    os.kill(pid, offer.SIGNAL)
    # The size first: the thread blocks the signal until it has written all.
    while not os.fstat(file).st_size or has_signal(pid, "SigBlk", offer.SIGNAL):
        yield ()
    yield grouping.parse_threads(_read(file))


def _read(file: int) -> str:
    return os.pread(file, _MAX_BYTES, 0).decode(errors="replace")


def _offer_path(pid: int, number: int) -> str:
    """Return the path of the file of a process that offers its stacks, and catches the signal.

    Raises:
        OSError: the process does not, or it has ended.
    """
    if not has_signal(pid, "SigCgt", number):
        raise FileNotFoundError(f"process {pid} does not catch signal {number}")
    for path in processes.files_named(pid, offer.FILES[number]):
        # The file is in no directory: another file of this name must not be truncated.
        if os.stat(path).st_nlink == 0:
            return path
    raise FileNotFoundError(f"process {pid} has no file of its stacks")


# -- py-spy ----------------------------------------------------------------------------------------


def _with_py_spy(
    stack: RankStack, *, seconds: float, native: bool, warn: Callable[[str], None]
) -> RankStack:
    """Return a rank with native stacks, or those of py-spy if it has not answered.

    py-spy reads the memory of a running process. With --native, it stops the process meanwhile.
    """
    program = py_spy_path(stack.pid)
    threads: tuple[ThreadStack, ...] = ()
    tids = map(int, files.listed(f"/proc/{stack.pid}/task"))
    if native and (stack.state.startswith(STOPPED) or any(map(_waits_for_files, tids))):
        warn("no native frames of a process that is stopped or waits for a file system")
    elif native:
        threads = _dump(program, stack.pid, "--native", seconds)
        if not threads:
            failed = "failed; see ptrace_scope, or the container's rights"
            why = failed if program else "is not installed; pip install py-spy"
            warn(f"no native frames: py-spy {why}")
    if not threads and not stack.answered:
        threads = _dump(program, stack.pid, "--nonblocking", seconds)
    return replace(stack, answered=True, threads=threads) if threads else stack


def py_spy_path(pid: int) -> str | None:
    """Return the path of py-spy: on the PATH of the process, or on this process's."""
    own = ""
    with contextlib.suppress(OSError):
        # A worker that has become another user may have changed its environment.
        if os.stat(f"/proc/{pid}").st_uid == os.geteuid():
            own = processes.environment_of(pid).get("PATH", "")
    return shutil.which("py-spy", path=own) or shutil.which("py-spy")


def _dump(program: str | None, pid: int, option: str, seconds: float) -> tuple[ThreadStack, ...]:
    argv = [program or "py-spy", "dump", "--json", option, "--pid", str(pid)]
    return parse_py_spy(processes.output_of(argv, os.environ, seconds), pid)


def parse_py_spy(text: str, pid: int) -> tuple[ThreadStack, ...]:
    """Return the threads of py-spy's JSON, the main thread first; none if it is malformed."""
    found: dict[int, ThreadStack] = {}
    try:
        for thread in json.loads(text)[:MAX_THREADS]:
            tid = int(thread["os_thread_id"] or 0)
            name = thread["thread_name"] or ("MainThread" if tid == pid else f"thread {tid}")
            shown = [_frame(each) for each in thread["frames"][:MAX_FRAMES]]
            python = [index for index, each in enumerate(shown) if each.line is not None]
            # Below the outermost Python frame are those of the interpreter's start.
            whole = shown[: python[-1] + 1] if python else shown
            found[tid] = ThreadStack(str(name)[:MAX_TEXT], grouping.of_program(whole))
    except (ValueError, LookupError, TypeError, RecursionError, OverflowError):
        return ()
    return tuple(found[tid] for tid in sorted(found, key=lambda tid: (tid != pid, tid)))


def _frame(frame: dict[str, Any]) -> Frame:
    line = frame["line"]
    native = bool(frame["module"])  # with debug information, it has a line of a file in C
    return Frame(
        str(frame["filename"] or frame["module"] or "???")[:MAX_TEXT],
        line if type(line) is int and 0 < line < 10**9 and not native else None,
        str(frame["name"])[:MAX_TEXT],
    )
