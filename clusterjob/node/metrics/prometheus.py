"""Serve a node's newest sample as Prometheus text over HTTP on 127.0.0.1.

Names and units follow Prometheus' "Metric and label naming". Any user of the machine can read them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from clusterjob.node.metrics.samples import NodeFacts, Sample

_MAX_REQUEST = 8 << 10  # bytes
_MAX_CLIENTS = 8  # at a time
_TIMEOUT = 5.0  # seconds for a request and its answer
_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# One family: name, type, help, and its lines of (labels, value); a value of None is left out.
_Lines = Iterable[tuple[Mapping[str, object], float | None]]
_Family = tuple[str, str, str, _Lines]


async def serve(port: int, text: Callable[[], str]) -> asyncio.Server:
    """Answer GET /metrics on 127.0.0.1 with a text until the server is closed.

    Raises:
        OSError: the port is in use, or may not be used.
    """
    clients = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal clients
        clients += 1
        try:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                if clients <= _MAX_CLIENTS:
                    await asyncio.wait_for(_answer(reader, writer, text), _TIMEOUT)
        finally:
            clients -= 1
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    return await asyncio.start_server(handle, "127.0.0.1", port, limit=_MAX_REQUEST)


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, text: Callable[[], str]
) -> None:
    try:
        request = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        status, body = "400 Bad Request", ""
    else:
        first, *fields = request.split(b"\r\n")
        method, target, *_ = [*first.split(b" "), b"", b""]
        if not all(map(_is_of_this_machine, fields)):
            status, body = "403 Forbidden", "the Host must be an address or localhost\n"
        elif target.split(b"?")[0] != b"/metrics":
            status, body = "404 Not Found", "the metrics are at /metrics\n"
        elif method not in (b"GET", b"HEAD"):
            status, body = "405 Method Not Allowed", ""
        else:
            status, body = "200 OK", text()
        if method == b"HEAD":
            body = ""
    data = body.encode(errors="replace")
    head = f"HTTP/1.1 {status}\r\nContent-Type: {_TYPE}\r\nContent-Length: {len(data)}\r\n"
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + data)
    await writer.drain()


def _is_of_this_machine(field: bytes) -> bool:
    """Return False for a Host with a name.

    A page in a browser of this machine can let its own name point here (DNS rebinding).
    """
    name, _, value = field.decode(errors="replace").partition(":")
    if name.strip().lower() != "host":
        return True
    host = re.sub(r":\d*$", "", value.strip()).strip("[]")
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return host.lower() in ("", "localhost")


def text_of(
    job_id: str, latest: tuple[NodeFacts, Sample] | None, usage: Mapping[str, Any] | None
) -> str:
    """Return a sample in Prometheus' text format; empty before the first sample.

    Args:
        job_id: the job.
        latest: the node and its newest sample.
        usage: the sums of all samples; see `Usage.to_json`.
    """
    if latest is None or usage is None:
        return ""
    facts, sample = latest
    node = {"job": job_id, "node": facts.node_rank}
    families = [*_node(facts, sample, usage, node), *_workers(sample, usage, node)]
    return "".join(map(_family, [*families, *_gpus(facts, sample, node)]))


def _node(
    facts: NodeFacts, sample: Sample, usage: Mapping[str, Any], node: Mapping[str, object]
) -> Iterable[_Family]:
    def one(name: str, kind: str, text: str, value: float) -> _Family:
        return name, kind, text, [(node, value)]

    about = {**node, "host": facts.host, "attempt": facts.attempt}
    yield "info", "gauge", "The node of the job.", [(about, 1)]
    yield one("sample_timestamp_seconds", "gauge", "Time of the sample.", sample.time)
    yield one("restarts_total", "counter", "Restarts of the workers.", sample.restart)
    quiet = "Time since the last output or heartbeat."
    yield one("output_age_seconds", "gauge", quiet, sample.quiet)
    yield one("node_cpu_cores", "gauge", "Cores that the job may use.", facts.cores)
    yield one("node_cpu_seconds_total", "counter", "Busy time of all cores of the machine.",
        usage["machine_cpu_seconds"])  # fmt: skip
    yield one("node_load1", "gauge", "Load average of one minute.", sample.load)
    yield one("node_memory_used_bytes", "gauge", "Memory in use.", sample.memory)
    yield one("node_memory_limit_bytes", "gauge", "Memory that the job may use.", facts.memory)
    for name, field in (("receive", "received"), ("transmit", "sent")):
        yield one(f"node_network_{name}_bytes_total", "counter", f"Bytes {field}.", usage[field])
    for name in ("read", "written"):
        yield one(f"node_disk_{name}_bytes_total", "counter", f"Bytes {name}.", usage[name])


def _workers(
    sample: Sample, usage: Mapping[str, Any], node: Mapping[str, object]
) -> Iterable[_Family]:
    now = [({**node, "rank": rank}, worker) for rank, worker in sample.workers.items()]
    sums = [({**node, "rank": rank}, values) for rank, values in usage["ranks"].items()]
    yield ("worker_cpu_seconds_total", "counter", "CPU time of the rank's processes.",
        [(labels, values[0]) for labels, values in sums])  # fmt: skip
    for name, place in (("read", 1), ("written", 2)):
        yield (f"worker_disk_{name}_bytes_total", "counter", f"Bytes {name} by the rank.",
            [(labels, values[place]) for labels, values in sums])  # fmt: skip
    yield ("worker_resident_memory_bytes", "gauge", "Resident memory.",
        [(labels, worker.rss) for labels, worker in now])  # fmt: skip
    yield ("worker_proportional_memory_bytes", "gauge", "Proportional share of the memory.",
        [(labels, worker.pss) for labels, worker in now])  # fmt: skip
    yield ("worker_threads", "gauge", "Threads.",
        [(labels, worker.threads) for labels, worker in now])  # fmt: skip


def _gpus(facts: NodeFacts, sample: Sample, node: Mapping[str, object]) -> Iterable[_Family]:
    pairs = [
        ({**node, "gpu": gpu.index, "uuid": gpu.uuid}, gpu, now)
        for gpu, now in zip(facts.gpus, sample.gpus, strict=False)
    ]
    yield ("gpu_memory_size_bytes", "gauge", "Memory of the GPU.",
        [(labels, gpu.memory) for labels, gpu, _ in pairs])  # fmt: skip
    for name, field, factor, text in (
        ("utilization_ratio", "use", 0.01, "Share of the time in which a kernel ran."),
        ("memory_used_bytes", "memory", 1, "Memory in use."),
        ("power_watts", "power", 1, "Power."),
        ("temperature_celsius", "temperature", 1, "Temperature."),
        ("sm_clock_hertz", "sm_clock", 10**6, "Clock of the multiprocessors."),
        ("memory_clock_hertz", "memory_clock", 10**6, "Clock of the memory."),
        ("ecc_uncorrected_errors_total", "ecc", 1, "Uncorrected ECC errors since the driver load."),
        ("last_xid", "xid", 1, "The last XID error code; 0 for none."),
    ):
        values = [(labels, getattr(now, field)) for labels, _, now in pairs]
        kind = "counter" if name.endswith("_total") else "gauge"
        yield (
            f"gpu_{name}",
            kind,
            text,
            [
                (labels, None if value is None else round(value * factor, 4))
                for labels, value in values
            ],
        )


def _family(family: _Family) -> str:
    name, kind, text, lines = family
    shown = [
        f"clusterjob_{name}{{{','.join(_label(*pair) for pair in labels.items())}}} {value!r}\n"
        for labels, value in lines
        if value is not None
    ]
    head = f"# HELP clusterjob_{name} {text}\n# TYPE clusterjob_{name} {kind}\n"
    return head + "".join(shown) if shown else ""


def _label(name: str, value: object) -> str:
    text = str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'{name}="{text}"'
