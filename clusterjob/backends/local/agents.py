"""The agents of jobs on this machine: start them, and find those that run."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

from clusterjob.core.plans import PlannedCommand
from clusterjob.core.records import Record
from clusterjob.node import contract
from clusterjob.node.environments import worker_variables
from clusterjob.node.system import processes

# The workers get this variable, so that a job that a worker submits is recorded in the same
# directory.
_HOME = "CLUSTERJOB_HOME"


def start(
    command: PlannedCommand,
    log: Path,
    hidden: Collection[str],
    stdin: int | None,
    locks: Sequence[int] = (),
) -> tuple[int, int]:
    """Start one agent in its own session; return its pid and the write end of its lifeline.

    Args:
        command: the command line and variables of the agent.
        log: the file for the agent's output.
        hidden: variables of this process that the script does not get: secrets, which the agent
            reads from a file.
        stdin: the descriptor that becomes rank 0's stdin; the agent's own stdin is its lifeline.
        locks: descriptors of the job's locks on GPUs, which the agent holds.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in worker_variables.LAUNCH_VARIABLES
        and name not in hidden
        and (name == _HOME or not name.startswith("CLUSTERJOB_"))
    }
    # A copy, because in the agent descriptor 0 is the lifeline.
    copies = [] if stdin is None else [os.dup(stdin)]
    stdin_variable = {contract.STDIN_FD: str(copies[0])} if copies else {}
    read_end, write_end = os.pipe()
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                command.argv,
                stdin=read_end,
                stdout=output,
                stderr=output,
                env=inherited | dict(command.env) | stdin_variable,
                pass_fds=(*copies, *locks),
                start_new_session=True,
            )
    except BaseException:
        os.close(write_end)
        raise
    finally:
        for descriptor in (read_end, *copies):
            os.close(descriptor)
    # With a return code, Popen does not warn that the agent still runs when this process ends.
    process.returncode = 0
    return process.pid, write_end


def live(record: Record) -> list[dict[str, int]]:
    """Return the agents of a job that run on this machine."""
    if (
        record.handle is None
        or other_host(record)
        or record.handle.data.get("boot_id") != processes.boot_id()
    ):
        return []
    agents: list[dict[str, int]] = record.handle.data["agents"]
    processes.reap([agent["pid"] for agent in agents])
    return [agent for agent in agents if processes.start_ticks(agent["pid"]) == agent["ticks"] != 0]


def other_host(record: Record) -> str:
    """Return the host on which the job runs; empty if that is this machine."""
    here = socket.gethostname()
    host = here if record.handle is None else str(record.handle.data.get("host"))
    return "" if host == here else host
