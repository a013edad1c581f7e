"""Read the stacks of processes that do not answer with py-spy, where that is possible.

Without native frames, py-spy reads the memory of a running process: it neither stops the process
nor needs its help, so it also reads one that is stopped or waits in the kernel.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterjob.node.stacks import frames
from clusterjob.node.stacks.frames import MAX_FRAMES, MAX_TEXT, MAX_THREADS, Frame, ThreadStack
from clusterjob.node.stacks.offer import anonymous_file

_MAX_BYTES = 16 << 20
_AT_ONCE = 16  # processes
_NATIVE_AT_ONCE = 2  # each stops a process, for longer if they share a core


@dataclass(frozen=True)
class Dump:
    """The answer of py-spy about one process: its threads, the main thread first, or an error."""

    threads: tuple[ThreadStack, ...] = ()
    error: str = ""


def dump(pids: Sequence[int], end: float, *, native: bool) -> dict[int, Dump]:
    """Return the stacks of processes.

    Args:
        pids: the processes.
        end: the monotonic time after which py-spy is ended.
        native: whether to add the frames of C and C++. This stops each process for 0.1 s to 0.2 s.
    """
    found: dict[int, Dump] = {}
    step = _NATIVE_AT_ONCE if native else _AT_ONCE
    for begin in range(0, len(pids), step):
        runs = [(pid, _Run(pid, native=native)) for pid in pids[begin : begin + step]]
        found.update({pid: run.result(end) for pid, run in runs})
    return found


class _Run:
    """One run of py-spy."""

    def __init__(self, pid: int, *, native: bool) -> None:
        self._pid = pid
        self._process: subprocess.Popen[bytes] | None = None
        program = _program(pid)
        self._error = "" if program else "py-spy is not installed on the node"
        if program is None:
            return
        self._output, self._errors = (anonymous_file("clusterjob-py-spy") for _ in range(2))
        # Only with native frames py-spy must stop the process.
        mode = "--native" if native else "--nonblocking"
        try:
            self._process = subprocess.Popen(
                [program, "dump", "--json", mode, "--pid", str(pid)],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._errors,
            )
        except OSError as error:
            self._error = f"{program} cannot be run: {error.strerror}"
            self._close()

    def result(self, end: float) -> Dump:
        """Wait for the end and return the result."""
        if self._process is None:
            return Dump(error=self._error)
        try:
            self._process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self._error = "py-spy did not answer in time"
        try:
            if not self._error and self._process.returncode == 0:
                return Dump(parse(os.pread(self._output, _MAX_BYTES, 0), self._pid))
            text = os.pread(self._errors, 1 << 12, 0).decode(errors="replace")
        finally:
            self._close()
        if "ermission" in text:
            return Dump(
                error="py-spy may not read the process: ptrace_scope, or a container without ptrace"
            )
        return Dump(error=self._error or f"py-spy: {text.partition(chr(10))[0][:200]}")

    def _close(self) -> None:
        os.close(self._output)
        os.close(self._errors)


def _program(pid: int) -> str | None:
    """Return the path of py-spy: on the PATH of the process, or on this process's."""
    entries: list[bytes] = []
    with contextlib.suppress(OSError):
        # A worker that has become another user may have changed its environment.
        if os.stat(f"/proc/{pid}").st_uid == os.geteuid():
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    own = (os.fsdecode(entry[5:]) for entry in entries if entry.startswith(b"PATH="))
    return shutil.which("py-spy", path=next(own, "")) or shutil.which("py-spy")


def parse(data: bytes, pid: int) -> tuple[ThreadStack, ...]:
    """Return the threads of py-spy's JSON, the main thread first; none if it is malformed."""
    try:
        threads = json.loads(data)
        found = {
            int(thread["os_thread_id"] or 0): ThreadStack(
                str(thread["thread_name"] or f"thread {thread['os_thread_id']}")[:MAX_TEXT],
                frames.of_program(map(_frame, thread["frames"][:MAX_FRAMES])),
            )
            for thread in threads[:MAX_THREADS]
        }
    except (ValueError, LookupError, TypeError, RecursionError):
        return ()
    return tuple(found[tid] for tid in sorted(found, key=lambda tid: (tid != pid, tid)))


def _frame(frame: dict[str, Any]) -> Frame:
    line = frame["line"]
    return Frame(
        str(frame["filename"] or frame["module"] or "???")[:MAX_TEXT],
        line if type(line) is int and 0 < line < 10**9 else None,
        str(frame["name"])[:MAX_TEXT],
    )
