"""Collect the stacks of a running job's ranks, or read those that were saved at its end."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import threading
import time
from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from clusterjob.core import inside, job_parts, polling
from clusterjob.core.records import Record
from clusterjob.errors import ClusterJobError, InsideError, os_error_text
from clusterjob.node.inside import MARKER
from clusterjob.node.logs import log_files
from clusterjob.node.logs.events import read_job_events
from clusterjob.node.logs.job_dir import LOGS
from clusterjob.node.stacks.grouping import RankStack
from clusterjob.node.system.sanitize import sanitize
from clusterjob.remote.pool import in_background

if TYPE_CHECKING:
    from clusterjob.backends.base import Executor

_T = TypeVar("_T")
_TIMEOUT = 60.0  # seconds for a node; Slurm may need long to start a step
_LAGGARD = 10.0  # seconds for the other nodes after the last one that has answered
_MAX_BYTES = 64 << 20  # of the answer of a node, or of a file
_MAX_RANKS = 256  # of a node
_MAX_STDERR, _MAX_LINE = 1 << 14, 300  # kept bytes of a node's stderr; characters of its last line
_SAVED = re.compile(r"stacks(?:\.attempt(\d{1,9}))?(?:\.restart(\d{1,9}))?\.json", re.ASCII)


@dataclass(frozen=True)
class JobStacks:
    """The stacks of a job.

    Attributes:
        stacks: the stacks, in the order of ranks.
        errors: why a node did not answer, one line for each.
        warnings: what could not be had, one line for each.
        saved: if the job does not run: why and when the stacks were saved, and where; else empty.
    """

    stacks: list[RankStack]
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    saved: str = ""


@dataclass(frozen=True)
class _Answer:
    host: str
    ranks: list[RankStack]
    warnings: list[str]


@dataclass(frozen=True)
class _Saved:
    ranks: list[RankStack]
    why: str = ""
    time: str = ""


def of_job(record: Record, *, node: int | None, rank: int | None, native: bool) -> JobStacks:
    """Return the stacks of a job's ranks; of an ended job, those that were saved at its end.

    Args:
        record: the job.
        node: the only node to ask; None for all.
        rank: the only rank to ask; None for all.
        native: whether to add the frames of C and C++.

    Raises:
        UsageError: the job is an array, or has no such node or rank.
        InsideError: the job does not run and has no saved stacks, or no node answered.
    """
    backend = inside.executor(record, node, rank)
    errors: list[str] = []
    if record.handle is not None:
        # The status is not read before: a host that does not answer would delay the others.
        found = _ask(record, backend, node=node, rank=rank, native=native)
        if found.stacks:
            return found
        errors = found.errors
    try:
        inside.check(record, node, rank)
    except InsideError as error:
        with contextlib.suppress(ClusterJobError):
            polling.collect(record)  # the file may be on the job's hosts
        saved = _saved(record, node, rank=rank)
        if saved is None:
            raise
        return replace(saved, saved=f"{error.message}; {saved.saved}")
    raise InsideError(
        errors[0] if errors else f"job {record.job_id}: no rank runs",
        f"`clusterjob status {record.job_id}` shows its state",
    )


def _ask(
    record: Record, backend: Executor, *, node: int | None, rank: int | None, native: bool
) -> JobStacks:
    """Ask all nodes, the given one, or the one of the rank, at the same time."""
    nodes = [inside.node_of(record, node, rank)]
    if node is None and rank is None:
        nodes = job_parts.nodes_with_workers(record)
    limit = threading.Semaphore(inside.at_once(record))

    def ask(each: int) -> _Answer:
        with limit:
            return _of_node(record, backend, node=each, rank=rank, native=native)

    # The command does not wait for a node that does not answer.
    futures = {in_background(functools.partial(ask, each)): each for each in nodes}
    late = _wait(futures)
    ranks: dict[int, RankStack] = {}
    errors, warnings = [], []
    for future, each in futures.items():
        try:
            if future in late:
                raise InsideError(f"node {each}: no answer in time")
            answer = future.result()
        except ClusterJobError as error:
            name = "" if f"node {each}" in error.message else f"node {each}: "
            errors.append(f"{name}{error.message}")
            continue
        warnings += [f"node {each}: {line}" for line in answer.warnings[:1]]
        if taken := [ranks[stack.rank] for stack in answer.ranks if stack.rank in ranks]:
            both = f"nodes {taken[0].node_rank} and {each}"
            warnings.append(f"{both} both answer for rank {taken[0].rank}: one of them is wrong")
        for stack in answer.ranks:
            ranks.setdefault(stack.rank, stack)
    return JobStacks([ranks[each] for each in sorted(ranks)], errors, warnings)


def _wait(futures: Collection[Future[_Answer]]) -> set[Future[_Answer]]:
    """Wait for all nodes; return those that take much longer than the others."""
    end = time.monotonic() + _TIMEOUT
    left = set(futures)
    while left and time.monotonic() < end:
        done, left = wait(left, end - time.monotonic(), FIRST_COMPLETED)
        if any(future.exception() is None for future in done):
            end = min(end, time.monotonic() + _LAGGARD)
    return left


def _of_node(
    record: Record, backend: Executor, *, node: int, rank: int | None, native: bool
) -> _Answer:
    """Return the answer of one node.

    Raises:
        InsideError: the node cannot be reached, or its answer is malformed.
    """
    process = inside.start(
        record, backend, node, {"rank": rank, "stacks": True, "native": native},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        errors, process.stderr = _StderrTail(process.stderr), None
        data = process.stdout.read(_MAX_BYTES)
        process.terminate()
    _, marker, text = data.partition(MARKER)
    if not marker:
        why = errors.last_line(1.0).removeprefix("clusterjob: error: ")
        raise InsideError(f"node {node}: {why or 'it sends no answer'}")
    answer = _decoded(text, _Answer, f"node {node}: it sends a malformed answer")
    if len(answer.ranks) > _MAX_RANKS:
        raise InsideError(f"node {node}: it sends too many ranks")
    # Each node speaks for itself alone.
    own = [replace(each, node_rank=node, host=sanitize(answer.host)) for each in answer.ranks]
    return replace(answer, ranks=own)


class _StderrTail:
    """Keeps the end of a child's stderr; a thread reads it, so that the child never blocks."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._kept = b""
        self._stream = stream
        self._thread = threading.Thread(target=self._read, name="clusterjob-stderr", daemon=True)
        self._thread.start()

    def last_line(self, timeout: float) -> str:
        """Return the last line that is not empty; another process may keep the stream open."""
        self._thread.join(timeout)
        text = self._kept.decode(errors="replace").strip()
        return text.rpartition("\n")[2].strip()[:_MAX_LINE]

    def _read(self) -> None:
        with self._stream:
            while part := os.read(self._stream.fileno(), 1 << 16):
                self._kept = (self._kept + part)[-_MAX_STDERR:]


def _decoded(data: bytes, type_: type[_T], problem: str) -> _T:
    import msgspec

    try:
        return msgspec.json.decode(data, type=type_)
    except (ValueError, RecursionError) as error:  # DecodeError, ValidationError
        raise InsideError(problem) from error


def _saved(record: Record, node: int | None, rank: int | None) -> JobStacks | None:
    """Return the stacks that were saved at the last stop of the job; None if there are none."""
    files: dict[tuple[int, int], list[tuple[int, Path]]] = {}
    last = _last_round(record.job_dir)
    for each in range(record.nodes):
        directory = log_files.node_directory(record.job_dir, each)
        for name in log_files.file_names(directory):
            if match := _SAVED.fullmatch(name):
                round_ = (int(match[1] or 0), int(match[2] or 0))
                if last is None or round_ <= last:  # a host may send a file of any name
                    files.setdefault(round_, []).append((each, directory / name))
    if not files:
        return None
    ranks: dict[int, RankStack] = {}
    why = ""
    warnings = []
    for owner, path in files[max(files)]:
        try:
            with log_files.open_regular(path) as stream:
                saved = _decoded(stream.read(_MAX_BYTES), _Saved, f"{path} is malformed")
        except InsideError as error:
            warnings.append(error.message)
            continue
        except OSError as error:
            warnings.append(os_error_text(error))
            continue
        why = why or ", ".join(filter(None, (saved.why, saved.time)))
        for stack in saved.ranks[: _MAX_RANKS * record.nodes]:
            own = owner in (0, stack.node_rank)  # node 0 collects the stacks of all nodes
            if own and node in (None, stack.node_rank) and rank in (None, stack.rank):
                ranks.setdefault(stack.rank, stack)
    if not ranks:
        return None
    where = record.job_dir / LOGS
    return JobStacks(
        [ranks[each] for each in sorted(ranks)],
        warnings=warnings,
        saved=sanitize(f"these stacks were saved in {where}{f': {why}' if why else ''}"),
    )


def _last_round(job_dir: Path) -> tuple[int, int] | None:
    """Return attempt and restart of the last round that node 0 has started; None if unknown."""
    rounds = [
        (attempt, restart)
        for event in read_job_events(job_dir)
        if event.get("event") == "started"
        and type(attempt := event.get("attempt")) is int
        and type(restart := event.get("restart")) is int
    ]
    return max(rounds, default=None)
