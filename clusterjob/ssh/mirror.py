"""A job's directory here as a mirror of what its hosts write: each file by byte offset, so that nothing is brought twice."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterjob.errors import HostError
from clusterjob.node import files
from clusterjob.node.logs import node_directory
from clusterjob.node.visit.look import MOST
from clusterjob.ssh.answers import MOST_FILES
from clusterjob.units import show_size

if TYPE_CHECKING:
    from clusterjob.ssh.exchange import Exchange
    from clusterjob.ssh.session import Session

Look = dict[str, Any]
STATUS_BYTES, LOG_BYTES = 1 << 20, MOST  # bytes that are asked for at once: to tell how a job stands; its logs
MOST_BYTES = 16 << 30  # that the files of one host, or of one job, may have here in all
_HINT = "this host is not to be trusted"

EVENTS, MOST_EVENTS = "events.jsonl", 64 << 20  # which is read as a whole


def contents(label: str, files: Sequence[dict[str, Any]], data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield the files of an answer, each with its bytes.

    Raises:
        HostError: there are not as many bytes as it says.
    """
    if sum(file["size"] for file in files) != len(data):
        raise HostError(label, "it sends other bytes than it announces", _HINT)
    position = 0
    for file in files:
        yield file, data[position : position + file["size"]]
        position += file["size"]


def check_volume(label: str, known: Mapping[str, int], files: Sequence[dict[str, Any]], most_files: int, where: Path) -> None:
    """Refuse files that are too many, or too large in all.

    Args:
        label: the host, for errors.
        known: the sizes of the files that are here, by path.
        files: those that it sends.
        most_files: how many there may be.
        where: the directory here.

    Raises:
        HostError: there are more.
    """
    if len(known.keys() | {file["path"] for file in files}) > most_files:
        raise HostError(label, f"it sends more than {most_files} files of one job", f"what has come lies in {where}")
    if sum(known.values()) + sum(file["size"] for file in files) > MOST_BYTES:
        raise HostError(
            label, f"it sends more than {show_size(MOST_BYTES)} of one job", f"what has come lies in {where}; the rest is there"
        )


def check_progress(label: str, answers: Iterable[dict[str, Any]], data: bytes, most: int) -> None:
    """Refuse an answer that says there is more although it is not full: it would be asked for ever.

    Raises:
        HostError: it is not full.
    """
    if any(answer["more"] for answer in answers) and len(data) < most // 2:
        raise HostError(label, "it says that there is more, and does not send it", _HINT)


def keep(label: str, job_dir: Path, file: dict[str, Any], content: bytes, stamps: dict[str, str]) -> None:
    """Keep what a host has sent of a file whose name was looked at.

    Args:
        label: the host, for errors.
        job_dir: the job's directory here, which is made anew where it was removed.
        file: the host's word of it: ``path``, and ``stamp`` of a file that is replaced, or ``offset`` in one that grows.
        content: its bytes.
        stamps: of the files that are replaced, by path; brought up to date.

    Raises:
        HostError: it cannot be written, or it is `EVENTS` and longer than `MOST_EVENTS`.
    """
    path = job_dir / file["path"]
    if file["path"] == EVENTS and file.get("offset", 0) + len(content) > MOST_EVENTS:
        raise HostError(label, f"it sends more than {show_size(MOST_EVENTS)} of {EVENTS}", _HINT)
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

    def look(self, session: Session | Exchange, *, logs: bool) -> Look:
        """Bring what is new; return whether the job is ``known`` there, its agent ``alive``, and whether there is ``more``.

        Raises:
            HostError: the host does not answer, or answers nonsense.
        """
        sizes, most = self._sizes(logs=logs), LOG_BYTES if logs else STATUS_BYTES
        have = {**self._stamps, **sizes}
        answer, data = session.ask("look", job=self._job_id, node=self._node, logs=logs, most=most, have=have)
        check_progress(session.label, [answer], data, most)
        check_volume(session.label, sizes, answer["files"], MOST_FILES, self._job_dir)
        for file, content in contents(session.label, answer["files"], data):
            name = file["path"]
            if not self._allowed.fullmatch(name) or ".." in name or ("offset" in file) == ("stamp" in file):
                raise HostError(session.label, f"it sends a file that was not asked for: {name[:80]!r}", _HINT)
            if "offset" in file and file["offset"] != sizes.get(name, 0):
                raise HostError(session.label, f"it sends a part of a file that was not asked for: {name[:80]!r}", _HINT)
            keep(session.label, self._job_dir, file, content, self._stamps)
        look: Look = answer
        return look

    def _sizes(self, *, logs: bool) -> dict[str, int]:
        paths = [self._job_dir / "events.jsonl"] if self._node == 0 else []
        folder = node_directory(self._job_dir, self._node)
        if logs and folder.is_dir():
            paths += list(folder.iterdir())
        return {str(path.relative_to(self._job_dir)): path.stat().st_size for path in paths if path.exists()}
