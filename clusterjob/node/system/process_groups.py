"""Signal, end and reap the process groups that a submitter started."""

from __future__ import annotations

import os
import signal
import time

from clusterjob.node.system import processes


def end(leaders: list[int], timeout: float) -> None:
    """End agents, or the shells that will exec them, with all processes of their process groups.

    A command that a shell forks while the SIGTERM arrives does not get the signal. So processes
    that outlive their leader are killed. An agent's forkserver is in its own process group, and
    stops the workers when the agent has ended.

    Args:
        leaders: pids of the leaders, each known to be alive.
        timeout: timeout of each leader, in seconds.
    """
    deadline = time.monotonic() + timeout
    for pid in leaders:
        signal_group(pid, signal.SIGTERM)
    while True:
        reap(leaders)
        leaders = [pid for pid in leaders if processes.start_ticks(pid) is not None or members(pid)]
        if not leaders:
            return
        for pid in leaders:
            if processes.start_ticks(pid) is None or time.monotonic() > deadline:
                signal_group(pid, signal.SIGKILL)
        time.sleep(0.02)


def members(leader: int) -> list[int]:
    """Return the live processes of a group, without zombies, which still accept signals."""
    found = []
    for entry in os.listdir("/proc"):
        fields = processes.stat_fields(int(entry)) if entry.isdigit() else None
        if fields is not None and fields[0] not in "ZX" and int(fields[2]) == leader:
            found.append(int(entry))
    return found


def signal_group(leader: int, number: int) -> bool:
    """Send a signal to a process group; return False if it has ended."""
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        return False
    return True


def reap(pids: list[int]) -> None:
    """Reap ended agents that are children of this process, so that no zombies remain."""
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue
