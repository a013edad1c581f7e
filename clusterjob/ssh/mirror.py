"""A job's directory here as a mirror of what its hosts write: each file by byte offset, so that nothing is brought twice."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterjob.errors import HostError
from clusterjob.node import files
from clusterjob.node.logs import node_directory

if TYPE_CHECKING:
    from clusterjob.ssh.session import Session

Look = dict[str, Any]


def keep(label: str, job_dir: Path, file: dict[str, Any], content: bytes, stamps: dict[str, str]) -> None:
    """Keep what a host has sent of a file whose name was looked at.

    Args:
        label: the host, for errors.
        job_dir: the job's directory here, which is made anew where it was removed.
        file: the host's word of it: ``path``, and ``stamp`` of a file that is replaced, or ``offset`` in one that grows.
        content: its bytes.
        stamps: of the files that are replaced, by path; brought up to date.

    Raises:
        HostError: it cannot be written.
    """
    path = job_dir / file["path"]
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if "stamp" in file:
            files.write_atomic(path, content)
            stamps[file["path"]] = file["stamp"]
        else:
            # At its offset, not at the end: another process may mirror the same bytes at this moment.
            handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(handle, content, file["offset"])
            finally:
                os.close(handle)
    except OSError as error:
        raise HostError(label, f"what it has written cannot be kept here: {error.strerror}: {path}") from error


class Mirror:
    """The part of a job's directory that one host writes.

    Args:
        job_id: the job.
        job_dir: its directory here.
        node: the node.
    """

    def __init__(self, job_id: str, job_dir: Path, node: int) -> None:
        self._job_id = job_id
        self._job_dir = job_dir
        self._node = node
        self._stamps: dict[str, str] = {}
        # What a host may write here: it is not trusted with more.
        lead = r"events\.jsonl|result\.json|" if node == 0 else ""
        self._allowed = re.compile(rf"{lead}ends/node{node}\.(?:json|refused)|logs/node{node}/[\w.-]+", re.ASCII)

    def look(self, session: Session, *, logs: bool) -> Look:
        """Bring what is new; return whether the job is ``known`` there, its agent ``alive``, and whether there is ``more``.

        Raises:
            HostError: the host does not answer, or answers nonsense.
        """
        sizes = self._sizes(logs=logs)
        have = {**self._stamps, **sizes}
        answer, data = session.ask("look", job=self._job_id, node=self._node, logs=logs, have=have)
        position = 0
        for file in answer["files"]:
            content = data[position : position + file["size"]]
            position += file["size"]
            name = file["path"]
            if not self._allowed.fullmatch(name) or ".." in name or ("offset" in file and file["offset"] != sizes.get(name, 0)):
                raise HostError(session.connection.target.label, f"it sends a file that was not asked for: {name[:80]!r}")
            keep(session.connection.target.label, self._job_dir, file, content, self._stamps)
        look: Look = answer
        return look

    def _sizes(self, *, logs: bool) -> dict[str, int]:
        paths = [self._job_dir / "events.jsonl"] if self._node == 0 else []
        folder = node_directory(self._job_dir, self._node)
        if logs and folder.is_dir():
            paths += list(folder.iterdir())
        return {str(path.relative_to(self._job_dir)): path.stat().st_size for path in paths if path.exists()}
