"""What a job has written on this host since the submitter last looked: by byte offset where files
grow, whole where they change.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from clusterjob.node.logs.log_files import node_directory
from clusterjob.node.system import processes

MOST = 4 << 20  # bytes of one answer of the files that grow
_MOST_REPLACED = 8 << 20  # bytes of a file that is replaced
MOST_OF_ANSWER = MOST + _MOST_REPLACED


def agent_file(job_dir: Path, node_rank: int) -> Path:
    """Return where it is written which process a node's agent is."""
    return job_dir / "agents" / f"node{node_rank}.json"


def agent_of(job_dir: Path, node_rank: int) -> int | None:
    """Return the pid of a node's agent if it lives on this host, in this boot of it."""
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


def look(job_dir: Path, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Return how a node fares and what is new in its files.

    Args:
        job_dir: the job's directory on this host.
        request: ``node``; ``logs``, whether its logs are wanted; ``most``, the bytes that are
            wanted at once, at most `MOST`; ``have``, for each file how much of it the submitter
            has: bytes of those that grow, the stamp of those that are replaced.
    """
    node, have = int(request["node"]), request["have"]
    known = job_dir.is_dir()
    alive = (
        agent_of(job_dir, node) is not None
    )  # before its files are read: what is dead by now has written its end
    answer = News(job_dir, have, data=bytearray(), most=int(request["most"]))
    if request["logs"]:
        answer.node_logs(node_directory(job_dir, node))
    if node == 0:
        answer.grown(job_dir / "events.jsonl")
        answer.replaced(job_dir / "result.json")
    answer.replaced(job_dir / "ends" / f"node{node}.json")
    answer.replaced(job_dir / "ends" / f"node{node}.refused")
    return {"known": known, "alive": alive, "files": answer.files, "more": answer.more}, bytes(
        answer.data
    )


class News:
    """What is new in a job's directory.

    Args:
        job_dir: the directory.
        have: for each file how much of it the submitter has.
        data: where the bytes go; several may share it, and its limit.
        most: the bytes after which no more are added.
    """

    def __init__(self, job_dir: Path, have: dict[str, Any], data: bytearray, most: int) -> None:
        self._job_dir = job_dir
        self._have = have
        self.files: list[dict[str, Any]] = []
        self.data = data
        self._most = min(most, MOST)
        self.more = False
        self._full = False

    def node_logs(self, logs: Path) -> None:
        """Add what is new in the logs of a node."""
        # The timeline is measured first and sent last: nobody is to read of bytes that he does not
        # have yet.
        noted = _size(logs / "timeline")
        for path in sorted(logs.iterdir()) if logs.is_dir() else []:
            if path.name != "timeline":
                self.grown(path)
        if not self.more:
            self.grown(logs / "timeline", noted)

    def grown(self, path: Path, upto: int | None = None) -> None:
        """Add what a file has grown by."""
        name = str(path.relative_to(self._job_dir))
        offset = int(self._have.get(name, 0))
        size = _size(path) if upto is None else upto
        if size <= offset and (size or not path.exists() or name in self._have):
            return
        room = self._most - len(self.data)
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
        """Add a small file that is written anew at each change."""
        name = str(path.relative_to(self._job_dir))
        try:
            status = os.stat(path)
            stamp = f"{status.st_mtime_ns}-{status.st_size}-{status.st_ino}"
            if self._have.get(name) == stamp or status.st_size > _MOST_REPLACED:
                return
            if len(self.data) > self._most:
                self.more = self._full = True
            if self._full:
                # Nor any later one: a verdict is not to come before the ends that it is explained
                # by.
                return
            with path.open("rb") as stream:
                data = stream.read(_MOST_REPLACED)
        except OSError:
            return
        self.files.append({"path": name, "stamp": stamp, "size": len(data)})
        self.data += data

    def gone(self) -> None:
        """Add which of the files that are replaced are no more: a job that runs again puts its
        verdict aside.
        """
        for name, value in self._have.items():
            if isinstance(value, str) and not (self._job_dir / name).exists():
                self.files.append({"path": name, "gone": True, "size": 0})


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
