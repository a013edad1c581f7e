"""A job's directory here as a mirror of what its hosts write: each file by byte offset, so that
nothing is brought twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterjob.core.units import show_size
from clusterjob.errors import HostError
from clusterjob.node.host_server.poll import MOST
from clusterjob.node.logs.log_files import node_directory
from clusterjob.node.system import files
from clusterjob.remote.answer_schemas import MOST_FILES

if TYPE_CHECKING:
    from clusterjob.remote.protocol import Exchange
    from clusterjob.remote.session import Session

Look = dict[str, Any]
STATUS_BYTES, LOG_BYTES = (
    1 << 18,
    MOST,
)  # bytes that are asked for at once: to tell how a job stands; its logs
MOST_BYTES = 16 << 30  # that the files of one host, or of one job, may have here in all
MOST_REPLACED = (
    64 << 20
)  # bytes of a node's files that are replaced, each time counted; an honest one has 32 KiB, once an attempt
_HINT = "this host is not to be trusted"

EVENTS, MOST_EVENTS = "events.jsonl", 64 << 20  # which is read as a whole


def contents(
    label: str, files: Sequence[dict[str, Any]], data: bytes
) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield the files of an answer, each with its bytes.

    Raises:
        HostError: there are not as many bytes as it says.
    """
    if sum(file["size"] for file in files) != len(data):
        raise HostError(label, "it sends other bytes than it announces", hint=_HINT)
    position = 0
    for file in files:
        yield file, data[position : position + file["size"]]
        position += file["size"]


class Volume:
    """Counts what a host sends of one job to this process, and refuses what is too much.

    Args:
        label: the host, for errors.
        job_dir: the job's directory here.
        nodes: of how many nodes it sends the files.
    """

    def __init__(self, label: str, job_dir: Path, nodes: int = 1) -> None:
        self._label = label
        self._where = job_dir
        self._nodes = nodes
        self._replaced = 0

    def check(self, known: Iterable[str], files: Sequence[dict[str, Any]]) -> None:
        """Count the files of an answer.

        Args:
            known: paths of the files that are here.
            files: those that it sends.

        Raises:
            HostError: there are too many, they are too large in all, or some come again and again.
        """
        names, paths = set(known), {file["path"] for file in files}
        if len(paths) < len(files):
            raise HostError(self._label, "it sends a file twice in one answer", hint=_HINT)
        come = f"what has come lies in {self._where}"
        if len(names | paths) > MOST_FILES * self._nodes:
            raise HostError(
                self._label,
                f"it sends more than {MOST_FILES * self._nodes} files of one job",
                hint=come,
            )
        sent = sum(file["size"] for file in files)
        if sent and sum(size_of(self._where / name) for name in names) + sent > MOST_BYTES:
            raise HostError(
                self._label,
                f"it sends more than {show_size(MOST_BYTES)} of one job",
                hint=f"{come}; the rest is there",
            )
        self._replaced += sum(file["size"] for file in files if "stamp" in file)
        if self._replaced > (most := MOST_REPLACED * self._nodes):
            raise HostError(
                self._label,
                f"it sends the ends of one job again and again, more than {show_size(most)}",
                hint=_HINT,
            )


def size_of(path: Path) -> int:
    """Return the bytes of a file; 0 where it is gone."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def check_progress(label: str, answers: Iterable[dict[str, Any]], data: bytes, most: int) -> None:
    """Refuse an answer that says there is more although it is not full: it would be asked for ever.

    Raises:
        HostError: it is not full.
    """
    if any(answer["more"] for answer in answers) and len(data) < most // 2:
        raise HostError(label, "it says that there is more, and does not send it", hint=_HINT)


def keep(
    label: str, job_dir: Path, file: dict[str, Any], content: bytes, stamps: dict[str, str]
) -> None:
    """Keep what a host has sent of a file whose name was looked at.

    Args:
        label: the host, for errors.
        job_dir: the job's directory here, which is made anew where it was removed.
        file: the host's word of it: ``path``, and ``stamp`` of a file that is replaced, or
            ``offset`` in one that grows.
        content: its bytes.
        stamps: of the files that are replaced, by path; brought up to date.

    Raises:
        HostError: it cannot be written, or it is `EVENTS` and longer than `MOST_EVENTS`.
    """
    path = job_dir / file["path"]
    if file["path"] == EVENTS and file.get("offset", 0) + len(content) > MOST_EVENTS:
        raise HostError(
            label, f"it sends more than {show_size(MOST_EVENTS)} of {EVENTS}", hint=_HINT
        )
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if "stamp" in file:
            files.write_atomic(path, content)
            stamps[file["path"]] = file["stamp"]
        else:
            # At its offset, not at the end: another process may mirror the same bytes at this
            # moment.
            handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(handle, content, file["offset"])
            finally:
                os.close(handle)
    except OSError as error:
        raise HostError(
            label, f"what it has written cannot be kept here: {error.strerror}: {path}"
        ) from error


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
        self._volume: Volume | None = None
        # What a host may write here: it is not trusted with more.
        verdict = r"result\.json|" if node == 0 else ""
        self._replaced = re.compile(rf"{verdict}ends/node{node}\.(?:json|refused)")
        self._log = re.compile(rf"logs/node{node}/[\w.-]+", re.ASCII)

    def look(self, session: Session | Exchange, *, logs: bool) -> Look:
        """Bring what is new; return whether the job is ``known`` there, its agent ``alive``, and
        whether there is ``more``.

        Raises:
            HostError: the host does not answer, or answers nonsense.
        """
        sizes, most = self._sizes(logs=logs), LOG_BYTES if logs else STATUS_BYTES
        have = {**self._stamps, **sizes}
        answer, data = session.ask(
            "look", bulk=logs, job=self._job_id, node=self._node, logs=logs, most=most, have=have
        )
        check_progress(session.label, [answer], data=data, most=most)
        self._volume = self._volume or Volume(session.label, self._job_dir)
        self._volume.check(have, answer["files"])
        for file, content in contents(session.label, answer["files"], data=data):
            name = file["path"]
            if not self._may_send(file, logs=logs):
                raise HostError(
                    session.label,
                    f"it sends a file that was not asked for: {name[:80]!r}",
                    hint=_HINT,
                )
            if "offset" in file and file["offset"] != sizes.get(name, 0):
                raise HostError(
                    session.label,
                    f"it sends a part of a file that was not asked for: {name[:80]!r}",
                    hint=_HINT,
                )
            keep(session.label, self._job_dir, file=file, content=content, stamps=self._stamps)
        look: Look = answer
        return look

    def _may_send(self, file: dict[str, Any], *, logs: bool) -> bool:
        """Return whether a file was asked for: whole where it is one that is replaced, else a part
        of one that grows.
        """
        name = file["path"]
        if "stamp" in file:
            return "offset" not in file and self._replaced.fullmatch(name) is not None
        log = logs and self._log.fullmatch(name) is not None and ".." not in name
        return "offset" in file and (log or (name == EVENTS and self._node == 0))

    def _sizes(self, *, logs: bool) -> dict[str, int]:
        paths = [self._job_dir / EVENTS] if self._node == 0 else []
        folder = node_directory(self._job_dir, self._node)
        if logs and folder.is_dir():
            paths += list(folder.iterdir())
        return {
            str(path.relative_to(self._job_dir)): path.stat().st_size
            for path in paths
            if path.exists()
        }
