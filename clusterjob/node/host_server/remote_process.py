"""A node's part of a job on this host: its files put there, its agent started so that it needs
nobody, and ended.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusterjob.node.host_server import gpus
from clusterjob.node.host_server.host_check import work_environment
from clusterjob.node.host_server.poll import agent_file, agent_of
from clusterjob.node.logs import ends
from clusterjob.node.logs.log_files import last_lines, node_directory
from clusterjob.node.system import files, private_dirs, process_groups, processes

_CANCEL_PATIENCE = (
    2.0  # seconds beyond the job's own grace, before an agent that does not stop is killed
)


class Work:
    """What a visit does for jobs.

    Args:
        home: where all of ours lies on this host.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._reserved: dict[str, gpus.Reservation] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return what is to be said to a request that has no bytes."""
        if request["op"] == "wish":
            return self._wish(request)
        job_dir, node = self._home / "jobs" / request["job"], int(request["node"])
        if request["op"] == "reserve":
            return self._reserve(request)
        if request["op"] == "start":
            return self._start(job_dir, node, request)
        if request["op"] == "up":
            return _up(job_dir, node)
        if request["op"] == "cancel":
            return _cancel(
                job_dir,
                node,
                grace=float(request["grace"]),
                interrupt=request.get("interrupt") is True,
            )
        if request["op"] == "remove":
            if (reserved := self._reserved.pop(request["job"], None)) is not None:
                reserved.release()
            shutil.rmtree(job_dir, ignore_errors=True)
            return {}
        raise ValueError(f"nobody here knows {request['op']!r}")

    def put(self, request: dict[str, Any], read: Callable[[int], bytes]) -> dict[str, Any]:
        """Make the job's directory with its files, readable by its owner alone.

        Args:
            request: ``job``, ``node``, and ``files``: (name, mode, size) in the order in which
                their bytes come.
            read: returns that many of the bytes.

        Raises:
            OSError: it cannot be written.
        """
        job_dir = self._home / "jobs" / request["job"]
        for folder in ("ends", "agents", f"logs/node{int(request['node'])}"):
            private_dirs.make(job_dir / folder)
        for made in (self._home, job_dir.parent, job_dir, job_dir / "logs"):
            made.chmod(0o700)  # they may be older, and of a generous umask
        for name, mode, size in request["files"]:
            files.write_atomic(job_dir / name, read(size), mode=mode)
        return {}

    def _wish(self, request: dict[str, Any]) -> dict[str, Any]:
        """Note the wish that jobs end; an element of an array that has not begun gets its directory
        for that.
        """
        for name in request["jobs"]:
            job_dir = self._home / "jobs" / name
            if (self._home / "jobs" / name.partition("/")[0]).is_dir():
                private_dirs.make(job_dir)
                ends.cancel(job_dir, interrupt=request.get("interrupt") is True)
        return {}

    def _reserve(self, request: dict[str, Any]) -> dict[str, Any]:
        """Choose a node's cards: ``devices`` is for CUDA_VISIBLE_DEVICES, None to leave that as it
        is; ``short`` says what is missing.
        """
        job_id, wanted, count = request["job"], request["gpus"], int(request["count"])
        try:
            if not wanted:
                return {"devices": gpus.share(count, os.environ), "short": ""}
            reserved = gpus.pick(job_id, wanted, count=count, environ=os.environ)
        except gpus.TooFewError as error:
            return {"devices": None, "short": str(error)}
        self._reserved[job_id] = reserved
        return {"devices": ",".join(card.uuid for card in reserved.cards), "short": ""}

    def _start(self, job_dir: Path, node: int, request: dict[str, Any]) -> dict[str, Any]:
        log = node_directory(job_dir, node) / "agent.log"
        reserved = self._reserved.pop(request["job"], None)
        with log.open("ab") as output:
            agent = subprocess.Popen(
                ["bash", str(job_dir / request["script"])], stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, cwd=job_dir, env=work_environment() | request["env"],
                start_new_session=True,
                pass_fds=reserved.descriptors if reserved is not None else (),
            )  # fmt: skip
        if reserved is not None:
            reserved.release()  # the agent, and all below it, hold the cards
        noted = {
            "pid": agent.pid,
            "ticks": processes.start_ticks(agent.pid) or 0,
            "boot_id": processes.boot_id(),
        }
        agent.returncode = (
            0  # it outlives this process: nobody here waits for it, and Popen need not warn of that
        )
        files.write_json(agent_file(job_dir, node), noted)
        return {}


def _up(job_dir: Path, node: int) -> dict[str, Any]:
    """Return whether the script has become the agent; ``why`` is set if it never will."""
    pid = agent_of(job_dir, node)
    refused = next(
        (failure for failure in ends.refusals(job_dir) if failure.node_rank == node), None
    )
    if refused is not None:
        said = (
            f" ({refused.last_lines[-1]})"
            if refused.last_lines and refused.message not in refused.last_lines[-1]
            else ""
        )
        return {"up": False, "why": f"{refused.message}{said}"}
    if pid is None:
        last = last_lines(node_directory(job_dir, node) / "agent.log", 1)
        ended = (ends.directory(job_dir) / f"node{node}.json").exists() or (
            job_dir / "result.json"
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


def _cancel(job_dir: Path, node: int, grace: float, *, interrupt: bool) -> dict[str, Any]:
    """Have the node's agent stop its workers, and kill it if it does not in time; or interrupt it,
    as Ctrl-C does, and return at once.
    """
    if job_dir.is_dir():
        ends.cancel(job_dir)
    pid = agent_of(job_dir, node)
    if pid is not None and interrupt:
        process_groups.signal_group(pid, signal.SIGINT)
    elif pid is not None:
        process_groups.end([pid], grace + _CANCEL_PATIENCE)
    return {"running": pid is not None}
