"""Mirror the files of a job from its hosts into the job's local directory.

Growing files are transferred from a byte offset, so that no byte is sent twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterjob.core.units import show_size
from clusterjob.errors import HostError
from clusterjob.node.host_server.jobs import MAX_BYTES
from clusterjob.node.logs.job_dir import EVENTS, RESULT, events_node
from clusterjob.node.system import files
from clusterjob.remote.answer_schemas import MAX_FILES
from clusterjob.remote.protocol import Exchange

if TYPE_CHECKING:
    from clusterjob.remote.session import Session

PollAnswer = dict[str, Any]
STATUS_BYTES = 1 << 18  # bytes per request for a job's status
LOG_BYTES = MAX_BYTES  # bytes per request for its logs
MAX_TOTAL_BYTES = 16 << 30  # maximum bytes of mirrored files, for one host or one job
# Bytes of a node's replaced files, summed over all replacements. A correct node writes 32 KiB per
# attempt.
MAX_REPLACED_BYTES = 64 << 20
_HINT = "this host is not to be trusted"

_ANY = r"\w[\w.-]*"
MAX_EVENTS_BYTES = 64 << 20  # the file is read into memory as a whole


def contents(
    label: str, files: Sequence[dict[str, Any]], data: bytes
) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield the files of an answer, each with its bytes.

    Raises:
        HostError: the files' sizes do not add up to the number of bytes.
    """
    if sum(file["size"] for file in files) != len(data):
        raise HostError(label, "it sends more or fewer bytes than it announces", hint=_HINT)
    position = 0
    for file in files:
        yield file, data[position : position + file["size"]]
        position += file["size"]


class Volume:
    """Limits for the files of one job that a host sends to this process.

    Args:
        label: the host, for errors.
        job_dir: the job's local directory.
        nodes: number of nodes whose files the host sends.
    """

    def __init__(self, label: str, job_dir: Path, nodes: int = 1) -> None:
        self._label = label
        self._where = job_dir
        self._nodes = nodes
        self._replaced = 0

    def check(self, known: Iterable[str], sent_files: Sequence[dict[str, Any]]) -> None:
        """Count the files of an answer and enforce the limits.

        Args:
            known: paths of the files that were received before.
            sent_files: the files that the answer sends.

        Raises:
            HostError: there are too many files or bytes, or files are replaced too often.
        """
        names, paths = set(known), {file["path"] for file in sent_files}
        if len(paths) < len(sent_files):
            raise HostError(self._label, "it sends a file twice in one answer", hint=_HINT)
        received = f"the files received so far are in {self._where}"
        if len(names | paths) > MAX_FILES * self._nodes:
            raise HostError(
                self._label,
                f"it sends more than {MAX_FILES * self._nodes} files of one job",
                hint=received,
            )
        sent = sum(file["size"] for file in sent_files)
        if (
            sent
            and sum(files.size_of(self._where / name) for name in names) + sent > MAX_TOTAL_BYTES
        ):
            raise HostError(
                self._label,
                f"it sends more than {show_size(MAX_TOTAL_BYTES)} of one job",
                hint=f"{received}; the rest is on the host",
            )
        self._replaced += sum(file["size"] for file in sent_files if "stamp" in file)
        if self._replaced > (most := MAX_REPLACED_BYTES * self._nodes):
            raise HostError(
                self._label,
                f"it replaces result files of one job too often, more than {show_size(most)}",
                hint=_HINT,
            )


def check_progress(label: str, answers: Iterable[dict[str, Any]], data: bytes, most: int) -> None:
    """Refuse an answer that is not full and announces more data.

    Otherwise the host could make this process poll forever.

    Raises:
        HostError: the answer is not full, but announces more data.
    """
    if any(answer["more"] for answer in answers) and len(data) < most // 2:
        raise HostError(label, "it announces more data and does not send it", hint=_HINT)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a path is one of a job's files, as in `node.host_server.jobs.poll`.

    In a pattern, ``*`` stands for letters, digits, dots, underscores and dashes.
    """
    forms = "|".join(re.escape(each).replace(r"\*", _ANY) for each in patterns)
    return re.fullmatch(forms, name, re.ASCII) is not None


def held(job_dir: Path, patterns: Sequence[str]) -> dict[str, int]:
    """Return the size of each file of these patterns in a local job directory."""
    found = (path for each in patterns for path in job_dir.glob(each) if path.is_file())
    sizes = {str(path.relative_to(job_dir)): files.size_of(path) for path in found}
    return {name: size for name, size in sizes.items() if matches(name, patterns)}


def keep(
    label: str,
    job_dir: Path,
    file: dict[str, Any],
    content: bytes,
    sizes: Mapping[str, int],
    stamps: dict[str, str],
    *,
    grown: Iterable[str],
    replaced: Iterable[str],
) -> None:
    """Write a part of a file that a host sent, or remove one that it has removed.

    Args:
        label: the host, for errors.
        job_dir: the job's local directory, which is created if it was removed.
        file: the host's description: ``path``, and ``offset`` in a growing file, ``stamp`` of a
            replaced one, or ``gone``.
        content: the bytes.
        sizes: the sizes of growing files here, as the host was told.
        stamps: stamps of replaced files by path; updated.
        grown: patterns of the growing files that the host may send.
        replaced: patterns of the replaced ones.

    Raises:
        HostError: the file was not asked for, cannot be written, or an event file would exceed
            `MAX_EVENTS_BYTES`.
    """
    name = file["path"]
    path, offset = job_dir / name, file.get("offset")
    kinds = (offset is not None) + ("stamp" in file) + bool(file.get("gone"))
    patterns = replaced if offset is None else grown
    if kinds != 1 or not matches(name, patterns) or (offset or 0) != sizes.get(name, 0):
        raise HostError(label, f"it sends a file that was not asked for: {name[:80]!r}", hint=_HINT)
    if events_node(name) is not None and (offset or 0) + len(content) > MAX_EVENTS_BYTES:
        raise HostError(
            label, f"it sends more than {show_size(MAX_EVENTS_BYTES)} of {name}", hint=_HINT
        )
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if offset is not None:
            # Write at the offset, not at the end: another process may mirror the same bytes now.
            handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(handle, content, offset)
            finally:
                os.close(handle)
        elif "stamp" in file:
            files.write_atomic(path, content)
            stamps[name] = file["stamp"]
        else:
            path.unlink(missing_ok=True)
            stamps.pop(name, None)
    except OSError as error:
        raise HostError(
            label, f"a file that it sends cannot be written here: {error.strerror}: {path}"
        ) from error


class JobMirror:
    """The local copy of one node's files of a job.

    Args:
        job_id: the job.
        job_dir: its local directory.
        node: the node's number.
    """

    def __init__(self, job_id: str, job_dir: Path, node: int) -> None:
        self._job_id = job_id
        self._job_dir = job_dir
        self._node = node
        self._stamps: dict[str, str] = {}
        self._volume: Volume | None = None
        # The only files that a host may write here.
        self._events = [f"events.*.node{node}.jsonl"]
        self._results = [f"ends/node{node}.json", f"ends/node{node}.refused"]
        if node == 0:
            self._events.append(EVENTS)
            self._results.append(RESULT)

    def poll(self, session: Session | Exchange, *, logs: bool) -> PollAnswer:
        """Fetch the new data of the node's files.

        Returns:
            The host's answer: whether the job is ``known`` there, its agent is ``alive``, and there
            is ``more`` data.

        Raises:
            HostError: the host does not answer, or its answer is malformed.
        """
        grown = [*([f"logs/node{self._node}/*"] if logs else []), *self._events]
        sizes, most = held(self._job_dir, grown), LOG_BYTES if logs else STATUS_BYTES
        asked = {
            "job": self._job_id,
            "node": self._node,
            "grown": grown,
            "late": [],
            "replaced": self._results,
            "sizes": sizes,
            "stamps": self._stamps,
        }
        polled, data = session.ask("poll", jobs=[asked], most=most, bulk=logs)
        if len(polled["jobs"]) != 1:
            raise HostError(session.label, "it answers about other jobs", hint=_HINT)
        answer: PollAnswer = polled["jobs"][0] | {"clock": polled["clock"]}
        check_progress(session.label, [answer], data=data, most=most)
        self._volume = self._volume or Volume(session.label, self._job_dir)
        self._volume.check({**self._stamps, **sizes}, answer["files"])
        for file, content in contents(session.label, answer["files"], data=data):
            keep(
                session.label,
                self._job_dir,
                file=file,
                content=content,
                sizes=sizes,
                stamps=self._stamps,
                grown=grown,
                replaced=self._results,
            )
        return answer
