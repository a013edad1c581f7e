"""The event log of a job: one JSON line per event."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clusterjob.node.logs.events import EventLog, now, read_events


def test_now_is_rfc_3339_in_utc_with_milliseconds() -> None:
    text = now()
    assert text.endswith("Z")
    assert len(text) == len("2024-01-01T00:00:00.000Z")
    parsed = datetime.fromisoformat(text.replace("Z", "+00:00"))
    assert abs(datetime.now(timezone.utc) - parsed) < timedelta(minutes=1)


def test_events_are_read_in_order_with_both_clocks(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    before = time.monotonic()
    log.add("joined", node_rank=1, host="näme ☃")
    log.add("ended", why="a\nb", missing=[1, 2])
    joined, ended = read_events(tmp_path / "events.jsonl")
    assert (joined["event"], joined["node_rank"], joined["host"]) == ("joined", 1, "näme ☃")
    assert (ended["event"], ended["why"], ended["missing"]) == ("ended", "a\nb", [1, 2])
    assert before - 0.001 <= joined["monotonic"] <= ended["monotonic"] <= time.monotonic() + 0.001
    assert joined["time"] <= ended["time"]
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 2


@example("ended", {"reason": "one\u2028\u2029\x85\x0b\x0c\x1c\x1etwo"})
@given(
    st.text(st.characters()),
    st.dictionaries(
        st.sampled_from(["why", "host", "reason"]),
        st.text(st.characters()) | st.integers() | st.lists(st.text()),
    ),
)
def test_any_event_text_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, event: str, details: dict[str, object]
) -> None:
    path = tmp_path_factory.mktemp("events", numbered=True) / "events.jsonl"
    EventLog(path).add(event, **details)
    EventLog(path).add("next")
    first, second = read_events(path)
    assert second["event"] == "next"
    # A lone surrogate cannot be written as UTF-8; all other text can.
    if all(printable(text) for text in [event, *details.values()]):
        assert first["event"] == event
        assert {name: first[name] for name in details} == details


def printable(value: object) -> bool:
    return json.dumps(value, ensure_ascii=False).encode(errors="replace").decode() == json.dumps(
        value, ensure_ascii=False
    )


def test_torn_or_invalid_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path).add("joined")
    with path.open("ab") as stream:
        stream.write(b'\xff{"event": "torn\n[1, 2]\n"text"\n\n{"event"')
    assert [event["event"] for event in read_events(path)] == ["joined"]
    assert list(read_events(tmp_path / "nowhere")) == []


def test_unwritable_event_log_raises_no_error(tmp_path: Path) -> None:
    # Each `add` that returns is the check.
    EventLog(tmp_path / "nowhere" / "events.jsonl").add("joined")
    if os.path.exists("/dev/full"):
        EventLog(Path("/dev/full")).add("joined")
