"""Write a job as Chrome trace events in JSON, which Perfetto and chrome://tracing open.

Each node is a process and each rank a thread. Phases are complete events (``X``), the job's events
are instant events (``i``), metrics are counters (``C``). Times are microseconds since the begin of
the job, see `clusterjob.insight.job_clock`.
"""

from __future__ import annotations

import heapq
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from clusterjob.core.records import Record
from clusterjob.insight import job_times, sample_files
from clusterjob.insight.job_clock import JobClock
from clusterjob.insight.job_times import Mark, Span
from clusterjob.node.logs import log_files
from clusterjob.node.system.sanitize import sanitize

MARK = '{"otherData": {"generator": "clusterjob trace"'  # identifies a trace to overwrite
# Process and thread numbers must differ: a thread with the number of a process is its main thread.
_FIRST_PROCESS = 1_000_000

_Event = dict[str, Any]


def write(record: Record) -> Iterator[str]:
    """Yield the text of a job's trace in pieces; the logs of the job are on this machine."""
    job_dir = record.job_dir
    nodes = sorted({*range(record.nodes), *log_files.nodes(job_dir)})
    sampled: dict[tuple[int, int], float] = {}  # the last sample of each node and attempt
    hosts: dict[int, str] = {}
    for node in nodes:
        for facts, sample in sample_files.times(job_dir, node):
            sampled[node, facts.attempt] = sample.monotonic
            hosts[node] = facts.host
    times = job_times.read(job_dir, nodes, sampled, runs=False)
    version = sys.modules["clusterjob"].__version__
    yield f'{MARK}, "version": "{version}", "job": {json.dumps(record.job_id)}}}, '
    yield '"displayTimeUnit": "ms", "traceEvents": [\n'
    streams = [
        iter(sorted(_phase_events(times.spans), key=_time)),
        (_instant(mark) for mark in times.marks),
        *(_counters(record, node, times.clock) for node in nodes),
    ]
    separator = ""
    for event in _names(times.spans, nodes, {**times.hosts, **hosts}):
        yield separator + json.dumps(event)
        separator = ",\n"
    for event in heapq.merge(*streams, key=_time):
        yield separator + json.dumps(event)
        separator = ",\n"
    yield "\n]}\n"


def _time(event: _Event) -> int:
    return int(event["ts"])


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


def _names(
    spans: Mapping[int, Mapping[int | None, Sequence[Span]]],
    nodes: Iterable[int],
    hosts: Mapping[int, str],
) -> Iterator[_Event]:
    """Yield the names of processes and threads, and their order on the screen."""
    for node in nodes:
        agent = _thread(node, None)
        title = sanitize(f"node {node} {hosts.get(node, '')}".rstrip())
        yield _metadata(node, agent, "process_name", name=title)
        yield _metadata(node, agent, "process_sort_index", sort_index=node)
        for rank in spans.get(node, {}):
            thread = _thread(node, rank)
            title = "agent" if rank is None else f"rank {rank}"
            yield _metadata(node, thread, "thread_name", name=title)
            order = -1 if rank is None else rank
            yield _metadata(node, thread, "thread_sort_index", sort_index=order)


def _metadata(node: int, thread: int, kind: str, **about: object) -> _Event:
    process = _FIRST_PROCESS + node
    return {"pid": process, "tid": thread, "ph": "M", "ts": 0, "name": kind, "args": about}


def _thread(node: int, rank: int | None) -> int:
    return _FIRST_PROCESS + node if rank is None else rank + 1


def _phase_events(
    spans: Mapping[int, Mapping[int | None, Sequence[Span]]],
) -> Iterator[_Event]:
    for node, ranks in spans.items():
        for rank, own in ranks.items():
            for span in own:
                about: dict[str, Any] = {"restart": span.restart, "attempt": span.attempt}
                about |= {"detail": span.detail} if span.detail else {}
                event: _Event = {
                    "name": span.phase,
                    "cat": "phase",
                    "pid": _FIRST_PROCESS + node,
                    "tid": _thread(node, rank),
                    "ts": _micros(span.begin),
                    "args": about,
                }
                if span.phase == "ended":
                    yield {**event, "ph": "i", "s": "t"}
                else:
                    yield {**event, "ph": "X", "dur": max(0, _micros(span.end) - event["ts"])}


def _instant(mark: Mark) -> _Event:
    return {
        "name": mark.name,
        "cat": "event",
        "ph": "i",
        "s": "g",
        "pid": _FIRST_PROCESS,
        "tid": _FIRST_PROCESS,
        "ts": _micros(mark.time),
        "args": {"text": mark.text},
    }


def _counters(record: Record, node: int, clock: JobClock) -> Iterator[_Event]:
    """Yield the metrics of a node, in the order of time."""
    last = 0
    for facts, sample in sample_files.lines(record.job_dir, node):
        time = last = max(last, _micros(clock.place(node, facts.attempt, sample.monotonic)))
        values: dict[str, dict[str, float]] = {
            "CPU (% of a core)": {"node": sample.cpu},
            "memory (bytes)": {"node": sample.memory},
            "network (bytes/s)": {"received": sample.received, "sent": sample.sent},
            "disk (bytes/s)": {"read": sample.read, "written": sample.written},
            "CPU of ranks (% of a core)": {f"rank {one.rank}": one.cpu for one in sample.workers},
            "memory of ranks (bytes)": {f"rank {one.rank}": one.rss for one in sample.workers},
            "GPU use (%)": {
                f"GPU {index}": one.use
                for index, one in enumerate(sample.gpus)
                if one.use is not None
            },
            "GPU memory (bytes)": {
                f"GPU {index}": one.memory
                for index, one in enumerate(sample.gpus)
                if one.memory is not None
            },
        }
        for name, about in values.items():
            if about:
                yield {
                    "name": name,
                    "cat": "metric",
                    "ph": "C",
                    "pid": _FIRST_PROCESS + node,
                    "tid": _FIRST_PROCESS + node,
                    "ts": time,
                    "args": about,
                }
