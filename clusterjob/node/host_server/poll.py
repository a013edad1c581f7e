"""Poll a node of a job, or many jobs: state of the agent, and new data in the files.

Growing files are sent from a byte offset, replaced files as a whole.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterjob.node.host_server import requests
from clusterjob.node.logs import ends
from clusterjob.node.logs.job_dir import (
    AGENTS,
    ENDS,
    LOGS,
    RESULT,
    SLURM_LOG,
    TIMELINE,
    event_files,
    events_node,
)
from clusterjob.node.logs.log_files import node_directory
from clusterjob.node.system import files, processes

MAX_BYTES = 4 << 20  # bytes of growing files in one answer
_MAX_REPLACED = 8 << 20  # bytes of one replaced file
MAX_ANSWER = MAX_BYTES + _MAX_REPLACED
_MAX_LAST = 1 << 20  # bytes of a worker's stderr that is sent for its last lines
JOB = re.compile(r"[^\W_][^/\0\n]*(?:/elements/[0-9]+)?")
_NAME = re.compile(r"\w[\w.-]*", re.ASCII)


def agent_file(job_dir: Path, node_rank: int) -> Path:
    """Return the file that names the process of a node's agent."""
    return job_dir / AGENTS / f"node{node_rank}.json"


def agent_of(job_dir: Path, node_rank: int) -> int | None:
    """Return the pid of a node's agent; None if it does not run on this host."""
    try:
        noted = json.loads(agent_file(job_dir, node_rank).read_text())
    except (OSError, ValueError):
        return None
    if (
        noted["boot_id"] != processes.boot_id()
        or processes.start_ticks(noted["pid"]) != noted["ticks"]
    ):
        return None
    return int(noted["pid"])


def poll_node(job_dir: Path, request: requests.PollNode) -> tuple[dict[str, Any], bytes]:
    """Return the state of a node and new data in its files.

    Args:
        job_dir: the job's directory on this host.
        request: the node, and the sizes and stamps of the files that the submitter has; at most
            `MAX_BYTES` are sent at once.

    Returns:
        ``known``: whether the job's directory exists; ``alive``: whether the agent runs; ``files``:
        the files whose bytes follow; ``more``: whether there is more data; ``clock``: the host's
        monotonic clock, to which the events of node 0 refer.
    """
    node = request.node
    known = job_dir.is_dir()
    # Check this before reading files: an agent that is dead now has written its result before.
    alive = agent_of(job_dir, node) is not None
    answer = News(
        job_dir,
        request.sizes,
        stamps=request.stamps,
        data=bytearray(),
        most=request.most,
    )
    if request.logs:
        answer.node_logs(node_directory(job_dir, node))
    for path in event_files(job_dir):
        if events_node(path.name) == node:
            answer.grown(path)
    if node == 0:
        answer.replaced(job_dir / RESULT)
    answer.replaced(job_dir / ENDS / f"node{node}.json")
    answer.replaced(job_dir / ENDS / f"node{node}.refused")
    return {
        "known": known,
        "alive": alive,
        "files": answer.files,
        "more": answer.more,
        "clock": time.monotonic(),
    }, bytes(answer.data)


@dataclass
class News:
    """Collects new data in a job's directory.

    Attributes:
        job_dir: the directory.
        sizes: the size of each growing file that the submitter has.
        stamps: the stamp (time, size and inode) of each replaced file that the submitter has.
        data: receives the bytes; several collectors may share it.
        most: maximum length of `data`, in bytes.
        files: the files to which the bytes belong.
        more: whether there is more data.
        full: whether a replaced file was left out.
    """

    job_dir: Path
    sizes: Mapping[str, int]
    stamps: Mapping[str, str]
    data: bytearray
    most: int
    files: list[dict[str, Any]] = field(default_factory=list)
    more: bool = False
    full: bool = False

    def node_logs(self, logs: Path) -> None:
        """Add new data in the logs of a node."""
        # The timeline is measured first and sent last: it must not refer to log bytes that the
        # submitter does not have yet.
        noted = files.size_of(logs / TIMELINE)
        for path in sorted(logs.iterdir()) if logs.is_dir() else []:
            if path.name != "timeline":
                self.grown(path)
        if not self.more:
            self.grown(logs / TIMELINE, noted)

    def grown(self, path: Path, upto: int | None = None) -> None:
        """Add the new bytes of a growing file, up to the size `upto`."""
        name = str(path.relative_to(self.job_dir))
        offset = self.sizes.get(name, 0)
        size = files.size_of(path) if upto is None else upto
        if size <= offset and (size or not path.exists() or name in self.sizes):
            return
        room = min(self.most, MAX_BYTES) - len(self.data)
        if size - offset > room:
            self.more = True
            if room <= 0:
                return
            size = offset + room
        with path.open("rb") as stream:
            stream.seek(offset)
            data = stream.read(size - offset)
        self.files.append({"path": name, "offset": offset, "size": len(data)})
        self.data += data

    def replaced(self, path: Path) -> None:
        """Add the whole content of a file if its stamp has changed."""
        name = str(path.relative_to(self.job_dir))
        try:
            status = os.stat(path)
            stamp = f"{status.st_mtime_ns}-{status.st_size}-{status.st_ino}"
            if self.stamps.get(name) == stamp or status.st_size > _MAX_REPLACED:
                return
            if len(self.data) > min(self.most, MAX_BYTES):
                self.more = self.full = True
            if self.full:
                # Skip all later files too: the verdict must not come before the nodes' results.
                return
            with path.open("rb") as stream:
                data = stream.read(_MAX_REPLACED)
        except OSError:
            return
        self.files.append({"path": name, "stamp": stamp, "size": len(data)})
        self.data += data

    def gone(self) -> None:
        """List files that the submitter has and that no longer exist on this host.

        An example is the verdict of an earlier run, which the next run renames.
        """
        for name in self.stamps:
            if not (self.job_dir / name).exists():
                self.files.append({"path": name, "gone": True, "size": 0})


def poll_jobs(home: Path, request: requests.PollJobs) -> tuple[dict[str, Any], bytes]:
    """Return new data in the directories of jobs.

    Args:
        home: clusterjob's directory on this host.
        request: the jobs, each with the sizes and stamps of the files that the submitter has.

    Returns:
        ``jobs``: for each job, ``known``: whether its directory exists; ``files``: the files whose
        bytes follow; ``more``: whether there is more data.
    """
    answers, data = [], bytearray()
    for asked in request.jobs:
        if not JOB.fullmatch(asked.job):
            raise ValueError(f"{asked.job!r} is not a job's name")
        job_dir = home / "jobs" / asked.job
        news = News(job_dir, asked.sizes, stamps=asked.stamps, data=data, most=request.most)
        known = job_dir.is_dir()
        if known:
            _add_files(job_dir, news, logs=asked.logs)
        answers.append({"known": known, "files": news.files, "more": news.more})
    return {"jobs": answers}, bytes(data)


def _add_files(job_dir: Path, news: News, logs: str) -> None:
    over = any(ends.directory(job_dir).glob("srun.*"))
    for node in _entries(job_dir / LOGS) if logs != "none" else []:
        if not node.is_dir():
            continue
        if logs == "all":
            news.node_logs(node)
        elif over:
            for path in _entries(node):
                if path.suffix == ".err" and path.stat().st_size <= _MAX_LAST:
                    news.grown(path)
    news.grown(job_dir / LOGS / SLURM_LOG)
    for path in event_files(job_dir):
        news.grown(path)
    # Send node results before the verdict: after the verdict the submitter stops reading.
    for path in _entries(ends.directory(job_dir)):
        if path.suffix != ".part":
            news.replaced(path)
    news.replaced(job_dir / RESULT)
    news.gone()


def _entries(folder: Path) -> Iterator[Path]:
    """Yield the entries of a directory whose names clusterjob may have written."""
    try:
        found = sorted(folder.iterdir())
    except OSError:
        return
    yield from (path for path in found if _NAME.fullmatch(path.name))
