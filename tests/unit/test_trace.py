"""The Chrome trace of a job: its schema, its order and its units."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from report_jobs import WrittenJob

from clusterjob.insight import trace

NODES, PER_NODE, SECONDS = 2, 2, 300.0


@pytest.fixture
def events(tmp_path: Path) -> list[dict[str, Any]]:
    record = WrittenJob(
        tmp_path, nodes=NODES, per_node=PER_NODE, seconds=SECONDS, failed=3, restarts=1
    ).write()
    text = "".join(trace.write(record))
    assert text.startswith(trace.MARK)
    value = json.loads(text)
    assert value["displayTimeUnit"] == "ms"
    return value["traceEvents"]


def test_trace_events_have_the_keys_of_their_kind(events: list[dict[str, Any]]) -> None:
    own = {"X": {"dur"}, "i": {"s"}, "C": set(), "M": set()}
    for event in events:
        common = {"name", "ph", "pid", "tid", "ts", "args"}
        assert event.keys() - {"cat"} == common | own[event["ph"]], event
        assert all(type(event[key]) is int for key in ("pid", "tid", "ts"))
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert type(event["dur"]) is int
            assert event["dur"] >= 0
        if event["ph"] == "i":
            assert event["s"] in ("g", "t")
        if event["ph"] == "C":
            assert all(type(value) in (int, float) for value in event["args"].values())


def test_trace_is_ordered_and_counts_microseconds(events: list[dict[str, Any]]) -> None:
    times = [event["ts"] for event in events]
    assert times == sorted(times)
    ends = [event["ts"] + event.get("dur", 0) for event in events]
    assert SECONDS * 0.9e6 < max(ends) <= SECONDS * 1.01e6
    setup = next(event for event in events if event["name"] == "setup")
    assert setup["dur"] == 4_000_000


def test_trace_has_a_process_per_node_and_a_thread_per_rank(events: list[dict[str, Any]]) -> None:
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    assert sorted(names.values()) == ["agent", "agent", "rank 0", "rank 1", "rank 2", "rank 3"]
    processes = {event["pid"] for event in events}
    assert len(processes) == NODES
    ranks = {tid for (_, tid), name in names.items() if name != "agent"}
    assert not ranks & processes  # such a thread would be the main thread of another process
    assert len(ranks) == NODES * PER_NODE
    for event in events:
        assert event["ph"] == "M" or (event["pid"], event["tid"]) in names


def test_trace_has_phases_events_and_metrics(events: list[dict[str, Any]]) -> None:
    kinds = Counter((event["ph"], event["name"]) for event in events)
    rounds, ranks = 2, NODES * PER_NODE
    assert kinds["X", "init"] == rounds * ranks
    assert kinds["X", "stop"] == rounds * (ranks - 1)
    assert kinds["i", "ended"] == rounds * ranks + 1  # and the event of the job
    assert kinds["i", "restart"] == 1
    assert kinds["C", "CPU of ranks (% of a core)"] == kinds["C", "GPU use (%)"] > 50 * NODES


def test_phases_of_a_rank_do_not_overlap(events: list[dict[str, Any]]) -> None:
    last: dict[tuple[int, int], int] = {}
    for event in events:
        if event["ph"] == "X":
            key = event["pid"], event["tid"]
            assert event["ts"] >= last.get(key, 0)
            last[key] = event["ts"] + event["dur"]
