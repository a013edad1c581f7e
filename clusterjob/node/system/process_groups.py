"""Process groups: those that a submitter started, signalled, ended with patience, and reaped."""

from __future__ import annotations

import os
import signal
import time

from clusterjob.node.system import processes


def end(leaders: list[int], patience: float) -> None:
    """Have agents, or the shells that are to become them, end with all that is in their process
    groups.

    A signal that meets a shell between fork and exec of a setup command is lost on that command:
    what outlives its leader is killed. An agent's starter is in a group of its own, and stops the
    workers when the agent is gone.

    Args:
        leaders: pids of the leaders, each known to be alive.
        patience: seconds that a leader may take.
    """
    deadline = time.monotonic() + patience
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
    """Return the live processes of a group; a zombie that nobody reaps is none, though it still can
    be signalled.
    """
    found = []
    for entry in os.listdir("/proc"):
        fields = processes.stat_fields(int(entry)) if entry.isdigit() else None
        if fields is not None and fields[0] not in "ZX" and int(fields[2]) == leader:
            found.append(int(entry))
    return found


def signal_group(leader: int, number: int) -> bool:
    """Signal a process group; return False when it is gone."""
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        return False
    return True


def reap(pids: list[int]) -> None:
    """Collect agents that are this process's own children, so that they do not stay as zombies
    while a job is followed.
    """
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue
