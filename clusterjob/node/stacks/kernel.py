"""Read what the kernel knows of a process and its threads."""

from __future__ import annotations

from pathlib import Path

from clusterjob.node.system import processes

_STATES = {
    "R": "runs", "S": "sleeps", "D": "waits for a disk or a file system",
    "T": "is stopped", "t": "is being traced", "Z": "has ended", "X": "has ended",
}  # fmt: skip
# Kernel functions in which a read of a FUSE file system waits, and a signal interrupts it.
FUSE_WAITS = ("request_wait_answer", "__fuse_request_send", "fuse_dev_do_write")
STOPPED = ("is stopped", "is being traced")
ENDED = "has ended"


def state(pid: int) -> str:
    """Return the state of a process's main thread, such as ``sleeps (hrtimer_nanosleep)``."""
    fields = processes.stat_fields(pid)
    text = ENDED if fields is None else _STATES.get(fields[0], "is about to end")
    if text == ENDED:
        return text
    try:
        channel = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        channel = ""
    return f"{text} ({channel})" if channel.strip("0") else text


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, in any language."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = status.partition("\nSigCgt:")[2].partition("\n")[0]
    return bool(int(caught.strip() or "0", 16) >> (number - 1) & 1)


def waits_for_files(tid: int) -> bool:
    """Return whether a thread waits for a file system, which a signal or ptrace disturbs."""
    text = state(tid)
    return text.startswith(_STATES["D"]) or text.endswith(tuple(f"({name})" for name in FUSE_WAITS))
