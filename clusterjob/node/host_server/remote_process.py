"""One node of a job on this host: write its files, start its agent, reserve GPUs, cancel it.

The agent runs independently of the session that starts it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusterjob.node.host_server import gpus, requests
from clusterjob.node.host_server.host_check import work_environment
from clusterjob.node.host_server.poll import agent_file, agent_of
from clusterjob.node.logs import ends
from clusterjob.node.logs.job_dir import AGENT_LOG, AGENTS, ENDS, LOGS, RESULT
from clusterjob.node.logs.log_files import last_lines, node_directory
from clusterjob.node.system import files, private_dirs, processes

# Seconds after the job's grace period before an agent that does not stop is killed.
_CANCEL_TIMEOUT = 2.0


class RemoteProcesses:
    """Requests of one session that start or change jobs.

    Args:
        home: clusterjob's directory on this host.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._reserved: dict[str, gpus.Reservation] = {}

    def put(self, request: requests.Put, read: Callable[[int], bytes]) -> dict[str, Any]:
        """Create the job's directory with its files, readable only by the user.

        Args:
            request: the node, and the files in the order of their bytes.
            read: returns the given number of the following bytes.

        Raises:
            OSError: a file cannot be written.
        """
        job_dir = self._job_dir(request.job)
        for folder in (ENDS, AGENTS, f"{LOGS}/node{request.node}"):
            private_dirs.make(job_dir / folder)
        for made in (self._home, job_dir.parent, job_dir, job_dir / LOGS):
            made.chmod(0o700)  # an existing directory may have another mode
        for name, mode, size in request.files:
            files.write_atomic(job_dir / name, read(size), mode=mode)
        return {}

    def request_stop(self, request: requests.RequestStop) -> dict[str, Any]:
        """Write a stop request for each job, also for array elements that have not started."""
        for name in request.jobs:
            job_dir = self._job_dir(name)
            if self._job_dir(name.partition("/")[0]).is_dir():
                private_dirs.make(job_dir)
                if request.stacks:
                    ends.want_stacks(job_dir)
                ends.cancel(job_dir, interrupt=request.interrupt)
        return {}

    def reserve(self, request: requests.Reserve) -> dict[str, Any]:
        """Choose a node's GPUs.

        Returns:
            ``devices``: the value for CUDA_VISIBLE_DEVICES; None to leave it unchanged.
            ``short``: why there are too few GPUs, or empty.
        """
        job_id, wanted, count = request.job, request.gpus, request.count
        try:
            if not wanted:
                return {"devices": gpus.share(count, os.environ), "short": ""}
            reserved = gpus.pick(job_id, wanted, count=count or None, environ=os.environ)
        except gpus.TooFewGpusError as error:
            return {"devices": None, "short": str(error)}
        self._reserved[job_id] = reserved
        return {"devices": ",".join(gpu.uuid for gpu in reserved.gpus), "short": ""}

    def start(self, request: requests.Start) -> dict[str, Any]:
        """Start a node's agent, which holds the reserved GPUs from then on."""
        job_dir = self._job_dir(request.job)
        log = node_directory(job_dir, request.node) / AGENT_LOG
        reserved = self._reserved.pop(request.job, None)
        with log.open("ab") as output:
            agent = subprocess.Popen(
                ["bash", str(job_dir / request.script)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=job_dir,
                env=work_environment() | request.env,
                start_new_session=True,
                pass_fds=reserved.descriptors if reserved is not None else (),
            )
        if reserved is not None:
            reserved.release()  # the agent and its children hold the locks
        noted = {
            "pid": agent.pid,
            "ticks": processes.start_ticks(agent.pid) or 0,
            "boot_id": processes.boot_id(),
        }
        # The agent outlives this process: stop Popen from warning that nothing waits for it.
        agent.returncode = 0
        files.write_json(agent_file(job_dir, request.node), noted)
        return {}

    def up(self, request: requests.Up) -> dict[str, Any]:
        """Return whether the agent runs; ``why`` is the reason if it will never run."""
        return _up(self._job_dir(request.job), request.node)

    def cancel(self, request: requests.Cancel) -> dict[str, Any]:
        """Stop the node's agent, or interrupt it.

        The agent stops its workers; an agent that does not end within the grace period is killed.
        An interrupt (SIGINT, as Ctrl-C sends) returns immediately.
        """
        job_dir = self._job_dir(request.job)
        if job_dir.is_dir():
            if request.stacks:
                ends.want_stacks(job_dir)
            ends.cancel(job_dir)
        pid = agent_of(job_dir, request.node)
        if pid is not None and request.interrupt:
            processes.signal_group(pid, signal.SIGINT)
        elif pid is not None:
            saving = ends.STACKS_SECONDS if request.stacks else 0.0
            processes.end_groups([pid], request.grace + saving + _CANCEL_TIMEOUT)
        return {"running": pid is not None}

    def remove(self, request: requests.Remove) -> dict[str, Any]:
        """Delete the job's directory, and release its GPUs."""
        if (reserved := self._reserved.pop(request.job, None)) is not None:
            reserved.release()
        shutil.rmtree(self._job_dir(request.job), ignore_errors=True)
        return {}

    def _job_dir(self, job_id: str) -> Path:
        return self._home / "jobs" / job_id


def _up(job_dir: Path, node: int) -> dict[str, Any]:
    pid = agent_of(job_dir, node)
    refused = next(
        (failure for failure in ends.refusals(job_dir) if failure.node_rank == node), None
    )
    if refused is not None:
        output = (
            f" ({refused.last_lines[-1]})"
            if refused.last_lines and refused.message not in refused.last_lines[-1]
            else ""
        )
        return {"up": False, "why": f"{refused.message}{output}"}
    if pid is None:
        last = last_lines(node_directory(job_dir, node) / AGENT_LOG, 1)
        ended = (ends.directory(job_dir) / f"node{node}.json").exists() or (
            job_dir / RESULT
        ).exists()
        return (
            {"up": True}
            if ended
            else {"up": False, "why": ": ".join(["the agent ended at once", *last])}
        )
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return {"up": False, "why": ""}
    return {"up": any(word.endswith(b"clusterjob-node.pyz") for word in words), "why": ""}
