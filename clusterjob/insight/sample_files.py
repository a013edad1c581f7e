"""Read the samples of a node from its file, which an agent writes.

A line becomes an object with the values of `clusterjob.node.metrics.samples.Sample`, in types that
are made from the same table. A line that is malformed, too long or cut is skipped. A job without
metrics has no samples.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, cast

import msgspec

from clusterjob.node.logs.job_dir import METRICS
from clusterjob.node.logs.log_files import node_directory, open_regular
from clusterjob.node.metrics.samples import Gpu, GpuSample, NodeFacts, Sample, WorkerSample

# Maximum bytes to read of a line, and at the end of a file. A host may send any file: a short line
# counts as `_MIN_LINE` bytes, because the time to decode it does not depend on its length.
_MAX_LINE, _MAX_FILE = 1 << 18, 128 << 20
_MIN_LINE = 256
_MAX_TEXT = 200  # characters of a name in the facts
_SHORTEST = 20  # bytes of a line
_TAIL = 1 << 20  # bytes at the end of a file in which its last sample is searched
# msgspec raises the second one for values that are deeply nested.
_MALFORMED = (ValueError, RecursionError)

# Values that a newer version adds at the end of an array are ignored.
_Number = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
_Rank = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
_TYPES: dict[str, Any] = {
    "float": _Number, "float | None": _Number | None, "int": _Count, "int | None": _Count | None,
    "str": str,
}  # fmt: skip


class TimesLine(msgspec.Struct, array_like=True, gc=False):
    """The two times of a sample; its other values are not decoded."""

    time: _Number
    monotonic: _Number


def _type_of(kind: type, *, as_array: bool = True, **lists: Any) -> Any:
    """Return a type of msgspec with the fields of a dataclass.

    Args:
        kind: the dataclass.
        as_array: whether it reads an array; else an object.
        lists: the types of fields that are lists.
    """
    made: list[Any] = []
    for one in dataclasses.fields(kind):
        listed = one.name in lists
        type_: Any = GenericAlias(list, (lists[one.name],)) if listed else _TYPES[str(one.type)]
        type_ = _Rank if one.name == "rank" else type_
        has_default = one.default is not dataclasses.MISSING and not listed
        made.append((one.name, type_, one.default) if has_default else (one.name, type_))
    return msgspec.defstruct(kind.__name__, made, array_like=as_array, gc=False)


_LINE = _type_of(Sample, workers=_type_of(WorkerSample), gpus=_type_of(GpuSample))
_FACTS = _type_of(NodeFacts, as_array=False, gpus=_type_of(Gpu))
_decode_facts = msgspec.json.Decoder(_FACTS).decode
_times = msgspec.json.Decoder(TimesLine).decode
_sample: Callable[[bytes], Sample] = msgspec.json.Decoder(_LINE).decode


def path_of(job_dir: Path, node_rank: int) -> Path:
    """Return the path of a node's samples."""
    return node_directory(job_dir, node_rank) / METRICS


def read(
    job_dir: Path, node_rank: int, since: float | None = None, gap: float = 0.0
) -> Iterator[tuple[NodeFacts, Sample]]:
    """Yield the samples of a node in order, each with the facts of its attempt.

    Args:
        job_dir: the job's directory.
        node_rank: the node.
        since: yield only the samples of this many seconds before the node's newest sample, of its
            newest attempt; None for all. Jumps of the wall clock have no effect.
        gap: minimum seconds between two samples; those between them are left out.
    """
    begin = (-1, 0.0)  # attempt and monotonic time
    if since is not None and (newest := latest(job_dir, node_rank)) is not None:
        begin = newest[0].attempt, newest[1].monotonic - since
    last = (-1, 0.0)
    for facts, line in _lines(path_of(job_dir, node_rank)):
        with contextlib.suppress(*_MALFORMED):
            place = (facts.attempt, _times(line).monotonic)
            near = place[0] == last[0] and place[1] - last[1] < gap
            if place >= begin and not (gap and near):
                yield facts, _sample(line)
                last = place


def latest(job_dir: Path, node_rank: int) -> tuple[NodeFacts, Sample] | None:
    """Return a node's newest sample; None without one. Reads only the end of the file."""
    found = None
    for facts, line in _lines(path_of(job_dir, node_rank), _TAIL, least=1):
        with contextlib.suppress(*_MALFORMED):
            found = facts, _sample(line)
    return found


def times(job_dir: Path, node_rank: int) -> Iterator[tuple[NodeFacts, TimesLine]]:
    """Yield the times of a node's samples in order, with their facts."""
    for facts, line in _lines(path_of(job_dir, node_rank)):
        with contextlib.suppress(*_MALFORMED):
            yield facts, _times(line)


def values(row: Sample | WorkerSample | GpuSample) -> dict[str, Any]:
    """Return the values of a sample, or of a part of it, by name."""
    return msgspec.structs.asdict(cast(msgspec.Struct, row))


def waits(worker: WorkerSample) -> float | None:
    """Return the percent of its steps for which a worker waits in collectives; None if unknown."""
    if not worker.step or worker.waited is None:
        return None
    return min(100.0, 100 * worker.waited / worker.step)


def parse(line: bytes) -> NodeFacts | Sample:
    """Return the facts or the sample of a line.

    Raises:
        ValueError: the line is malformed.
    """
    try:
        return _facts(line) if line.startswith(b"{") else _sample(line)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _lines(
    path: Path, limit: int = _MAX_FILE, least: int = _MIN_LINE
) -> Iterator[tuple[NodeFacts, bytes]]:
    """Yield the lines of samples at the end of a file, with the facts before them.

    Lines that are too long, or too short for a sample, are left out.

    Args:
        path: the file.
        limit: bytes at the end of the file to read.
        least: the bytes that a short line counts.
    """
    facts: NodeFacts | None = None
    with contextlib.suppress(OSError), open_regular(path) as stream:
        begin = stream.seek(max(0, os.fstat(stream.fileno()).st_size - limit)) == 0
        left = limit
        while left > 0 and (part := stream.readline(_MAX_LINE)):
            left -= max(len(part), least)
            whole, begin = begin and part.endswith(b"\n"), part.endswith(b"\n")
            if whole and part.startswith(b"{"):
                with contextlib.suppress(*_MALFORMED):
                    facts = _facts(part)
            elif whole and len(part) > _SHORTEST and facts is not None:
                yield facts, part


def _facts(line: bytes) -> NodeFacts:
    found = _decode_facts(line)
    gpus = [
        Gpu(one.index, one.uuid[:_MAX_TEXT], one.name[:_MAX_TEXT], one.memory) for one in found.gpus
    ]
    known = msgspec.structs.asdict(found) | {"host": found.host[:_MAX_TEXT], "gpus": tuple(gpus)}
    return NodeFacts(**known)
