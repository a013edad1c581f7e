"""Serve a node's newest sample as Prometheus text over HTTP on 127.0.0.1.

Names and units follow Prometheus' "Metric and label naming"; `clusterjob.node.metrics.samples` has
them. Any user of the machine can read them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from clusterjob.node.metrics.samples import (
    Gpu,
    GpuSample,
    NodeFacts,
    Sample,
    Usage,
    WorkerSample,
    columns,
)

_MAX_REQUEST = 8 << 10  # bytes
_MAX_CLIENTS = 8  # at a time
_TIMEOUT = 5.0  # seconds for a request, and for its answer
_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_HOST = re.compile(rb"\r\nhost:[ \t]*(.*?)(:\d*)?[ \t]*\r\n", re.IGNORECASE)
_ADDRESS = re.compile(rb"localhost|[\d.]*|\[[\da-f:.]*\]", re.IGNORECASE)
_Labels = Mapping[str, object]


async def serve(port: int, text: Callable[[], str]) -> asyncio.Server:
    """Answer GET /metrics on 127.0.0.1 with a text until the server is closed.

    Raises:
        OSError: the port is in use, or may not be used.
    """
    free = asyncio.Semaphore(_MAX_CLIENTS)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(
            OSError, EOFError, asyncio.LimitOverrunError, asyncio.TimeoutError
        ):
            if not free.locked():
                async with free:
                    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _TIMEOUT)
                    writer.write(_answer(head, text))
                    await asyncio.wait_for(writer.drain(), _TIMEOUT)
        writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    return await asyncio.start_server(handle, "127.0.0.1", port, limit=_MAX_REQUEST)


def _answer(head: bytes, text: Callable[[], str]) -> bytes:
    host = _HOST.search(head)
    # A page in a browser of this machine can let its own name point here (DNS rebinding).
    if host is not None and not _ADDRESS.fullmatch(host[1]):
        status, body = "403 Forbidden", "the Host must be an address or localhost\n"
    elif not re.match(rb"GET /metrics[ ?]", head):
        status, body = "404 Not Found", "the metrics are at /metrics\n"
    else:
        status, body = "200 OK", text()
    data = body.encode(errors="replace")
    fields = f"Content-Type: {_TYPE}\r\nContent-Length: {len(data)}\r\nConnection: close"
    return f"HTTP/1.1 {status}\r\n{fields}\r\n\r\n".encode() + data


def text_of(job_id: str, facts: NodeFacts, sample: Sample, usage: Usage) -> str:
    """Return a sample in Prometheus' text format.

    Args:
        job_id: the job.
        facts: the node.
        sample: its newest sample.
        usage: the sums of all samples.
    """
    node = {"job": job_id, "node": facts.node_rank}
    about = {**node, "host": facts.host, "attempt": facts.attempt}
    workers = [
        ({**node, "rank": worker.rank}, worker, usage.totals[str(worker.rank)])
        for worker in sample.workers
    ]
    gpus = [{**node, "gpu": gpu.index, "uuid": gpu.uuid} for gpu in facts.gpus]
    return "".join(
        [
            _family("info", "The node of the job.", [(about, 1)]),
            *_families(NodeFacts, [(node, facts, {})]),
            *_families(Sample, [(node, sample, usage.totals["node"])]),
            *_families(WorkerSample, workers),
            *_families(Gpu, [(*one, {}) for one in zip(gpus, facts.gpus, strict=True)]),
            *_families(GpuSample, [(*one, {}) for one in zip(gpus, sample.gpus, strict=False)]),
        ]
    )


def _families(
    kind: type, rows: Sequence[tuple[_Labels, object, Mapping[str, float]]]
) -> Iterator[str]:
    """Yield the families of a kind of sample or facts, from labels, rows and totals."""
    for name, column in columns(kind).items():
        scale = 1.0 if column["total"] else column["scale"]
        values = [
            (labels, (totals if column["total"] else vars(row))[name])
            for labels, row, totals in rows
        ]
        yield _family(column["family"], column["text"], values, scale)


def _family(
    name: str, text: str, values: Sequence[tuple[_Labels, float | None]], scale: float = 1.0
) -> str:
    shown = [
        f"clusterjob_{name}{{{','.join(_label(*pair) for pair in labels.items())}}}"
        f" {round(value * scale, 4)!r}\n"
        for labels, value in values
        if value is not None
    ]
    kind = "counter" if name.endswith("_total") else "gauge"
    head = f"# HELP clusterjob_{name} {text}\n# TYPE clusterjob_{name} {kind}\n"
    return head + "".join(shown) if shown else ""


def _label(name: str, value: object) -> str:
    return f"{name}={json.dumps(str(value), ensure_ascii=False)}"  # Prometheus' escapes are JSON's
