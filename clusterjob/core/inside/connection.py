"""Enter a running job: check its state, and start the program beside a worker."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from clusterjob.backends import base
from clusterjob.core import job_parts, polling
from clusterjob.core.byte_link import ByteLink
from clusterjob.core.records import Record
from clusterjob.errors import ClusterJobError, InsideError, UsageError
from clusterjob.node.inside import streams
from clusterjob.node.inside.streams import FrameError, Streams
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import JobState

_MAX_NOISE = 1 << 16  # bytes that a login or a prolog may print before the answer
_START_TIMEOUT = 90.0  # seconds until the answer; Slurm may need a minute to start a step
_SILENCE = 60.0  # seconds without a frame after which the node counts as unreachable


@dataclass(frozen=True)
class _Refusal:
    """Why a node cannot run a command; see `clusterjob.node.inside.program.find`."""

    why: str
    first: int = 0
    count: int = 0
    world: int = 0


@dataclass(frozen=True)
class _Answer:
    error: _Refusal | None = None
    rank: int | None = None
    host: str = ""
    outside: bool = False
    stacks: bool = False


class InsideConnection:
    """A connection to the program on one node, in use by one command or one relay.

    Args:
        record: the job.
        node: the node.
        link: the connection to the program.
        answer: the program's answer to the request.

    Attributes:
        streams: its streams.
        has_stacks: whether the stacks of the ranks follow.
        code: the exit code of the command, after `ended`; None if the command did not end itself.
        ended: whether the program has sent its last frame.
        job_ended: whether it ended because the job did.
        on_reset: called with the reason for each stream that the node refuses.
    """

    def __init__(self, record: Record, node: int, link: ByteLink, answer: _Answer) -> None:
        self.record, self.node = record, node
        self.rank, self.host, self.outside = answer.rank, sanitize(answer.host), answer.outside
        self.has_stacks = answer.stacks
        self.code: int | None = None
        self.ended = self.job_ended = False
        self.on_reset: Callable[[str], None] = lambda _: None
        self._link = link
        self.streams = Streams(link.reader, link.writer, control=self._control)

    @property
    def finished(self) -> bool:
        """Whether nothing more comes, and everything that came is written."""
        return (self.ended or self.streams.closed) and self.streams.written

    def handle(self, ready: dict[int, int]) -> None:
        """Handle the descriptors that are ready.

        Raises:
            InsideError: the node breaks the protocol, or has been silent for a minute.
        """
        try:
            self.streams.handle(ready)
        except FrameError as error:
            raise InsideError(f"node {self.node}: it sends {error}") from error
        over = self.ended or self.streams.closed
        if not over and self.streams.silence > _SILENCE:
            raise InsideError(f"node {self.node}: no answer for {_SILENCE:.0f} s")

    def exit_code(self) -> int:
        """Return the exit code of the command.

        Raises:
            InsideError: the job has ended, or the connection broke.
        """
        if self.code is not None and not self.job_ended:
            return self.code
        raise self.failure()

    def failure(self) -> InsideError:
        """Return why the command or the relay has ended without an end of its own."""
        status = None
        with contextlib.suppress(ClusterJobError):
            status = polling.status(self.record)
        if self.job_ended or (status is not None and status.state.final):
            return InsideError(f"job {self.record.job_id} has ended")
        why = self._link.error()
        return InsideError(f"node {self.node}: the connection broke{f': {why}' if why else ''}")

    def close(self) -> None:
        """Close the connection; the command and all processes below it end."""
        self._link.close()

    def _control(self, kind: int, _number: int, payload: bytes) -> None:
        if kind == streams.RESET:
            self.on_reset(payload.decode(errors="replace"))
        elif kind == streams.CONTROL:
            try:
                end = json.loads(payload)
                self.code, self.job_ended = end["code"], bool(end["ended"])
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                raise FrameError("a malformed end") from error
            if self.code is not None and (type(self.code) is not int or not 0 <= self.code < 256):
                raise FrameError("a malformed end")
            self.ended = True
        else:
            raise FrameError(f"a frame of kind {kind}")


def executor(record: Record, node: int | None = None, rank: int | None = None) -> base.Executor:
    """Return the backend of a job, if it can run commands inside its jobs.

    Raises:
        UsageError: the job is an array, has no such node, or its backend has no such feature.
    """
    job_parts.check_single(record, "workers")
    job_parts.check_nodes(record, None if node is None else [node])
    job_parts.check_ranks(record, None if rank is None else [rank], job_parts.world_size(record))
    backend = base.instance(record.backend)
    if not isinstance(backend, base.Executor):
        raise UsageError(
            f"the {record.backend} backend cannot run commands inside a job",
            f"`clusterjob logs {record.job_id}` shows the job's output",
        )
    return backend


def check(record: Record, node: int | None = None, rank: int | None = None) -> base.Executor:
    """Return the backend of a running job, if it can run commands inside its jobs.

    Raises:
        UsageError: as from `executor`.
        InsideError: the job does not run.
    """
    backend = executor(record, node, rank)
    status = polling.status(record)
    if status.state.final:
        raise InsideError(
            f"job {record.job_id} has ended: {status.state}",
            f"`clusterjob logs {record.job_id}` shows its output",
        )
    if status.state is not JobState.RUNNING:
        what = "has not started" if status.state is JobState.PENDING else "cannot be reached"
        raise InsideError(
            f"job {record.job_id} {what}{f': {status.reason}' if status.reason else ''}",
            f"`clusterjob status {record.job_id}` shows its state",
        )
    return backend


def enter(
    record: Record,
    backend: base.Executor,
    request: Mapping[str, Any],
    *,
    node: int | None = None,
    rank: int | None = None,
) -> InsideConnection:
    """Start the program beside a worker.

    Args:
        record: the job.
        backend: the result of `check`.
        request: what the program does; see `clusterjob.node.inside.program`.
        node: the worker's node; None for the node of `rank`, or of rank 0.
        rank: the worker's rank; None for the first rank of the node.

    Raises:
        UsageError: the job has no such rank, or the rank is on another node.
        InsideError: the node cannot be reached, or no worker runs there.
    """
    tried: set[int] = set()
    where = node if node is not None else _likely_node(record, rank)
    while True:
        tried.add(where)
        link, answer = _start(record, backend, request, node=where, rank=rank)
        if answer.error is None:
            return InsideConnection(record, where, link, answer)
        link.close()
        where = _next_node(record, answer.error, rank=rank, asked=where, fixed=node is not None)
        if where in tried:
            raise InsideError(f"job {record.job_id}: no node has rank {rank}")


def _likely_node(record: Record, rank: int | None) -> int:
    nodes = job_parts.nodes_with_workers(record)
    place = (rank or 0) // max(1, record.job.nproc_per_node)
    return nodes[min(len(nodes) - 1, place)]


def _next_node(
    record: Record, error: _Refusal, *, rank: int | None, asked: int, fixed: bool
) -> int:
    """Return the node that has the rank, if this node has other ranks.

    Raises:
        UsageError: the job has no such rank, or not on the node that the user has named.
        InsideError: no worker runs on the node.
    """
    if error.why != "rank" or rank is None or error.count < 1:
        starting = error.why == "starting"
        raise InsideError(
            f"job {record.job_id}: no worker runs on node {asked}",
            "try again when its workers have started; a job of an older version cannot be entered"
            if starting
            else f"`clusterjob status {record.job_id}` shows its state",
        )
    job_parts.check_ranks(record, [rank], error.world)
    if fixed:
        last = error.first + error.count - 1
        raise UsageError(
            f"rank {rank} is not on node {asked}", f"node {asked} has ranks {error.first} to {last}"
        )
    nodes = job_parts.nodes_with_workers(record)
    place = nodes.index(asked) if asked in nodes else 0
    place += (rank - error.first) // error.count
    return nodes[min(len(nodes) - 1, max(0, place))]


def _start(
    record: Record,
    backend: base.Executor,
    request: Mapping[str, Any],
    *,
    node: int,
    rank: int | None,
) -> tuple[ByteLink, _Answer]:
    try:
        link = backend.enter(record, node)
    except InsideError:
        raise
    except ClusterJobError as error:
        raise InsideError(error.message, error.hint) from error
    try:
        sent = {**request, "job": record.job_id, "node": node, "rank": rank}
        data = json.dumps(sent).encode() + b"\n"
        try:
            while data:
                data = data[os.write(link.writer, data) :]
        except OSError as error:
            raise InsideError(f"node {node}: {link.error() or 'the connection broke'}") from error
        return link, _read_answer(link, node)
    except BaseException:
        link.close()
        raise


def _read_answer(link: ByteLink, node: int) -> _Answer:
    import msgspec

    for line in _lines(link, node):
        if line.startswith(streams.MARKER):
            try:
                return msgspec.json.decode(line.removeprefix(streams.MARKER), type=_Answer)
            except (ValueError, RecursionError) as error:  # DecodeError, ValidationError
                raise InsideError(f"node {node}: it sends a malformed answer") from error
    raise InsideError(f"node {node}: {link.error() or 'it sends no answer'}")


def _lines(link: ByteLink, node: int) -> Iterator[bytes]:
    """Yield lines until the end; read no byte after the last line that is used.

    The program sends nothing after its answer that this side has not caused or can lose: bytes are
    read one line at a time.
    """
    end = time.monotonic() + _START_TIMEOUT
    seen = 0
    line = bytearray()
    while seen < _MAX_NOISE:
        if not streams.wait_for_any([], [link.reader], max(0.0, end - time.monotonic())):
            raise InsideError(f"node {node}: no answer for {_START_TIMEOUT:.0f} s")
        byte = os.read(link.reader, 1)
        if not byte:
            return
        seen += 1
        if byte != b"\n":
            line += byte
            continue
        yield bytes(line)
        line.clear()
    raise InsideError(f"node {node}: its login does not stop printing", "check .bashrc on the host")
