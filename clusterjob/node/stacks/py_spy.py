"""Read the stacks of processes that do not answer with py-spy, where that is possible.

py-spy reads the memory of a running process: it neither stops the process nor needs its help, so it
also reads one that is stopped or waits in the kernel.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clusterjob.node.stacks import frames
from clusterjob.node.stacks.frames import MAX_FRAMES, MAX_TEXT, MAX_THREADS, Frame, ThreadStack
from clusterjob.node.stacks.offer import anonymous_file

_MAX_BYTES = 16 << 20
_AT_ONCE = 16  # processes


def dump(pids: Sequence[int], end: float) -> dict[int, dict[int, ThreadStack]]:
    """Return the stacks of those processes that py-spy can read, by pid and by thread id.

    Args:
        pids: the processes.
        end: the monotonic time after which py-spy is ended.
    """
    found = {}
    for begin in range(0, len(pids), _AT_ONCE):
        runs = [(pid, _Run(pid)) for pid in pids[begin : begin + _AT_ONCE]]
        found.update({pid: run.result(end) for pid, run in runs})
    return found


class _Run:
    """One run of py-spy."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._process: subprocess.Popen[bytes] | None = None
        program = _program(pid)
        if program is None:
            return
        self._output = anonymous_file("clusterjob-py-spy")
        try:
            self._process = subprocess.Popen(
                [program, "dump", "--json", "--nonblocking", "--pid", str(pid)],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.DEVNULL,
            )
        except OSError:
            os.close(self._output)

    def result(self, end: float) -> dict[int, ThreadStack]:
        """Wait for the end and return the threads; none if py-spy has failed."""
        if self._process is None:
            return {}
        try:
            self._process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        try:
            data = os.pread(self._output, _MAX_BYTES, 0)
        finally:
            os.close(self._output)
        return parse(data, self._pid) if self._process.returncode == 0 else {}


def _program(pid: int) -> str | None:
    """Return the path of py-spy: on the PATH of the process, or on this process's."""
    entries: list[bytes] = []
    with contextlib.suppress(OSError):
        # A worker that has become another user may have changed its environment.
        if os.stat(f"/proc/{pid}").st_uid == os.geteuid():
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    own = (os.fsdecode(entry[5:]) for entry in entries if entry.startswith(b"PATH="))
    return shutil.which("py-spy", path=next(own, "")) or shutil.which("py-spy")


def parse(data: bytes, pid: int) -> dict[int, ThreadStack]:
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
    except (ValueError, LookupError, TypeError, RecursionError, OverflowError):
        return {}
    return {tid: found[tid] for tid in sorted(found, key=lambda tid: (tid != pid, tid))}


def _frame(frame: dict[str, Any]) -> Frame:
    line = frame["line"]
    return Frame(
        str(frame["filename"] or frame["module"] or "???")[:MAX_TEXT],
        line if type(line) is int and 0 < line < 10**9 else None,
        str(frame["name"])[:MAX_TEXT],
    )
