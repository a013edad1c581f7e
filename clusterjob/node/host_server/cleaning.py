"""Measure and remove the directories of ended jobs, and the code that no job uses."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from clusterjob.node.host_server import code_store, requests
from clusterjob.node.host_server.poll import JOB, agent_of
from clusterjob.node.logs.job_dir import AGENTS
from clusterjob.node.system import removal

_ENDING = 2.0  # seconds to wait for agents that have written their verdict and are about to exit
_AGENT = re.compile(r"node(\d{1,9})\.json", re.ASCII)


def clean(home: Path, request: requests.Clean) -> dict[str, Any]:
    """Measure ended jobs on this host; with `remove`, remove them.

    Args:
        home: clusterjob's directory on this host.
        request: the jobs.

    Returns:
        ``jobs``: for each job, ``size`` in bytes, a ``stamp`` of its directory, which two hosts
        share if they share the directory, and ``kept``: why it is not removed, or empty. ``code``:
        bytes of the code that no other job uses.

    Raises:
        ValueError: a name is not that of a job.
        OSError: the code store cannot be read.
    """
    answers = []
    until = time.monotonic() + _ENDING
    for name in request.jobs:
        if not JOB.fullmatch(name) or "/" in name:
            raise ValueError(f"{name!r} is not a job's name")
        job_dir = home / "jobs" / name
        while _running(job_dir) and time.monotonic() < until:
            time.sleep(0.05)
        answers.append(_clean(job_dir, remove=request.remove))
    if request.remove:
        removal.remove_abandoned(home / "jobs")
    gone = {name for name, answer in zip(request.jobs, answers, strict=True) if not answer["kept"]}
    return {"jobs": answers, "code": code_store.clean(home, gone, remove=request.remove)}


def _clean(job_dir: Path, *, remove: bool) -> dict[str, Any]:
    answer = {"size": 0, "stamp": "", "kept": ""}
    try:
        if not removal.is_directory(job_dir):
            return answer | {"kept": "its directory is a link" if job_dir.is_symlink() else ""}
        if why := _running(job_dir):
            return answer | {"kept": why}
        status = job_dir.lstat()
        answer |= {
            "size": removal.tree_size(job_dir),
            "stamp": f"{status.st_ino}-{status.st_ctime_ns}",
        }
        if remove:
            removal.remove_tree(job_dir)
    except OSError as error:
        answer["kept"] = f"{error.strerror or error}: {error.filename}"
    return answer


def _running(job_dir: Path) -> str:
    """Return why the job may still run on this host; empty if it does not."""
    try:
        names = [path.name for path in (job_dir / AGENTS).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return ""
    for name in names:
        match = _AGENT.fullmatch(name)
        try:
            if match is not None and agent_of(job_dir, int(match[1])) is not None:
                return f"its agent of node {match[1]} still runs"
        except (KeyError, TypeError, ValueError):
            return f"its file {AGENTS}/{name} is damaged"
    return ""
