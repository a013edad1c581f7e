"""Convert samples and the facts of a node to lines of JSON, and back with checks.

The facts are an object. A sample is an array in the order of the fields of `Sample`, with an array
for each worker, which begins with its rank, and for each GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from clusterjob.node.metrics.samples import Gpu, GpuSample, NodeFacts, Sample, WorkerSample

_MAX_NUMBER = 1e18
_MAX_TEXT = 200  # characters of a name in the facts
_GPU_FIELDS = len(fields(GpuSample))


def parse(line: bytes) -> NodeFacts | Sample:
    """Return the facts or the sample of a line; fields that a newer version adds are ignored.

    Raises:
        ValueError: the line is malformed.
    """
    try:
        value = json.loads(line)
        return _facts(value) if isinstance(value, dict) else _sample(value)
    except (TypeError, KeyError, RecursionError, OverflowError) as error:
        raise ValueError("it is not a line of metrics") from error


def facts_line(facts: NodeFacts) -> bytes:
    """Return the facts of a node as a line."""
    return _json({**vars(facts), "gpus": [list(vars(gpu).values()) for gpu in facts.gpus]})


def sample_line(sample: Sample) -> bytes:
    """Return a sample as a line."""
    *numbers, _, _ = vars(sample).values()
    workers = [[rank, *_short(vars(worker).values())] for rank, worker in sample.workers.items()]
    gpus = [_short(vars(gpu).values()) for gpu in sample.gpus]
    return _json([round(numbers[0], 2), round(numbers[1], 2), *_short(numbers[2:]), workers, gpus])


def _short(values: Iterable[float | None]) -> list[float | None]:
    """Round numbers for a file: one decimal below 1000, else none."""
    return [
        value if value is None or isinstance(value, int)
        else round(value, 1) if abs(value) < 1000 else round(value)
        for value in values
    ]  # fmt: skip


def _facts_json(facts: NodeFacts) -> dict[str, Any]:
    return {**vars(facts), "gpus": [list(vars(gpu).values()) for gpu in facts.gpus]}


def _json(value: Any) -> bytes:
    return (json.dumps(value, separators=(",", ":")) + "\n").encode()


def _number(value: Any) -> float:
    """Return a finite number of a plausible size.

    Raises:
        ValueError: it is not such a number.
    """
    if type(value) not in (int, float) or not abs(value) < _MAX_NUMBER:
        raise ValueError(f"{value!r:.50} is not a number of a sample")
    return float(value)


def _count(value: Any) -> int:
    return int(_number(value))


def _maybe(value: Any) -> float | None:
    return None if value is None else _number(value)


def _maybe_count(value: Any) -> int | None:
    return None if value is None else _count(value)


def _facts(value: dict[str, Any]) -> NodeFacts:
    gpus = [
        Gpu(_count(index), str(uuid)[:_MAX_TEXT], name=str(name)[:_MAX_TEXT], memory=_count(memory))
        for index, uuid, name, memory, *_ in value["gpus"]
    ]
    return NodeFacts(
        _count(value["node_rank"]),
        str(value["host"])[:_MAX_TEXT],
        attempt=_count(value["attempt"]),
        cores=_count(value["cores"]),
        memory=_count(value["memory"]),
        gpus=tuple(gpus),
    )


def _sample(value: Any) -> Sample:
    time, monotonic, restart, quiet, cpu, memory, load, received, sent, read, written = map(
        _number, value[:11]
    )
    workers, gpus = value[11:13]
    return Sample(
        time,
        monotonic,
        restart=int(restart),
        quiet=quiet,
        cpu=cpu,
        memory=int(memory),
        load=load,
        received=received,
        sent=sent,
        read=read,
        written=written,
        workers=dict(map(_worker, workers)),
        gpus=tuple(map(_gpu, gpus)),
    )


def _worker(value: Any) -> tuple[int, WorkerSample]:
    rank, cpu, rss, pss, read, written, threads = value[:7]
    if not 0 <= (number := _count(rank)) < 10**9:
        raise ValueError(f"{rank!r:.50} is not a rank")
    return number, WorkerSample(
        _number(cpu),
        _count(rss),
        pss=_maybe_count(pss),
        read=_number(read),
        written=_number(written),
        threads=_count(threads),
    )


def _gpu(value: Any) -> GpuSample:
    use, memory, power, temperature, sm_clock, memory_clock, ecc, xid = value[:_GPU_FIELDS]
    return GpuSample(
        _maybe(use),
        _maybe_count(memory),
        power=_maybe(power),
        temperature=_maybe(temperature),
        sm_clock=_maybe_count(sm_clock),
        memory_clock=_maybe_count(memory_clock),
        ecc=_maybe_count(ecc),
        xid=_maybe_count(xid),
    )
