"""Times that users write, and times and durations as text."""

from __future__ import annotations

import contextlib
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterjob.core import times
from clusterjob.errors import UsageError

NOW = datetime(2026, 11, 24, 16, 30, tzinfo=timezone.utc).astimezone()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2h", NOW - timedelta(hours=2)),
        ("1d12h", NOW - timedelta(hours=36)),
        ("90s", NOW - timedelta(seconds=90)),
        ("today", NOW.replace(hour=0, minute=0)),
        ("yesterday", NOW.replace(hour=0, minute=0) - timedelta(days=1)),
        ("00:00", NOW.replace(hour=0, minute=0)),
        ("2026-11-20", datetime(2026, 11, 20).astimezone()),
        ("2026-11-20T14:30", datetime(2026, 11, 20, 14, 30).astimezone()),
        ("2026-11-20T14:30:00Z", datetime(2026, 11, 20, 14, 30, tzinfo=timezone.utc)),
    ],
)
def test_point_in_time_is_parsed(text: str, expected: datetime) -> None:
    assert times.parse_point(text, now=NOW) == expected


@pytest.mark.parametrize(
    "text", ["", "2026", "soon", "2026-13-01", "25:00", "2027-01-01", "-2h", "0s", "2h ago"]
)
def test_wrong_or_future_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        times.parse_point(text, now=NOW)
    assert caught.value.message.startswith("--since")
    assert "yesterday" in caught.value.hint


@given(st.text(max_size=30))
def test_any_text_is_a_past_time_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert times.parse_point(text, now=NOW) <= NOW


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 s ago"),
        (185, "3 min ago"),
        (7300, "2 h ago"),
        (86400, "1 day ago"),
        (3 * 86400, "3 days ago"),
    ],
)
def test_recent_time_is_shown_as_age(seconds: int, shown: str) -> None:
    at = (NOW - timedelta(seconds=seconds)).isoformat()
    assert times.show_age(at, now=NOW) == shown


@pytest.mark.parametrize("age", [timedelta(days=8), timedelta(seconds=-5)])
def test_old_or_future_time_is_no_age(age: timedelta) -> None:
    assert times.show_age((NOW - age).isoformat(), now=NOW) == f"{NOW - age:%Y-%m-%d %H:%M}"


def test_broken_time_is_shown_as_nothing() -> None:
    assert times.show_age("nonsense", now=NOW) == times.show_local(None) == ""


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0 s"), (59.9, "59 s"), (200, "3m 20s"), (7500, "2h 05m"), (97200, "1d 03h")],
)
def test_duration_is_shown_with_two_units(seconds: float, shown: str) -> None:
    assert times.show_duration(seconds) == shown
