"""Parse points in time that users write, and show times and durations as text."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone

from clusterjob.core.units import parse_duration
from clusterjob.errors import SpecError, UsageError

_RECENT = 7 * 86400  # seconds for which a time is shown as an age
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?", re.ASCII)
_DURATION = re.compile(r"[\d.]+\s*[dhms][\d.dhms\s]*", re.IGNORECASE | re.ASCII)
_HINT = "write 30m, 2h, 3d, 14:30, today, yesterday, 2026-11-24 or 2026-11-24T14:30"


def parse_point(text: str, *, now: datetime | None = None) -> datetime:
    """Return the point in time that the text of ``--since`` names.

    Args:
        text: a duration before now, such as 2h; a time of today, such as 14:30; ``today`` or
            ``yesterday``; or a local date, with a time of day or without.
        now: the current time; by default that of this machine's clock.

    Raises:
        UsageError: the text names no time, or a time in the future.
    """
    now = now or datetime.now(timezone.utc).astimezone()
    found = _point(text.strip(), now)
    if found > now:
        raise UsageError(f"--since {text}: this time is in the future", _HINT)
    return found


def _point(text: str, now: datetime) -> datetime:
    today = now.replace(hour=0, minute=0, second=0, microsecond=0)
    if (seconds := parse_age(text)) is not None:
        try:
            return now - timedelta(seconds=seconds)
        except OverflowError:
            return datetime(1970, 1, 2, tzinfo=timezone.utc)
    if text.lower() in ("today", "yesterday"):
        return today if text.lower() == "today" else today - timedelta(days=1)
    try:
        if clock := _CLOCK.fullmatch(text):
            hour, minute, second = (int(part or 0) for part in clock.groups())
            return today.replace(hour=hour, minute=minute, second=second)
        if re.match(r"\d{4}-\d{2}-\d{2}", text, re.ASCII):
            return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone()
    except (ValueError, OverflowError, OSError):
        pass  # such as 2026-13-01 or 25:00
    raise UsageError(f"--since {text!r} is not a time", _HINT)


def parse_age(text: str) -> int | None:
    """Return a duration such as 10m or 1d12h in seconds; None if the text is no duration.

    A number needs a unit: 2026 may be meant as a year.
    """
    if not _DURATION.fullmatch(text.strip()):
        return None
    try:
        return parse_duration(text)
    except SpecError:
        return None


def parse_recorded(text: str | None) -> datetime | None:
    """Return the time of a record or a verdict, RFC 3339; None if it is missing or invalid."""
    try:
        found = datetime.fromisoformat((text or "").replace("Z", "+00:00"))
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=timezone.utc)


def show_local(text: str | None) -> str:
    """Show a recorded time as local time, such as 2026-11-24 14:30:05; empty if it is missing."""
    found = parse_recorded(text)
    try:
        return "" if found is None else f"{found.astimezone():%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):  # outside of the platform's calendar
        return ""


def show_age(text: str | None, *, now: datetime | None = None) -> str:
    """Show a recorded time of this machine as an age, such as 3 min ago, or as a local date.

    Times of the last 7 days are ages; other times are local dates with a time of day.
    """
    found = parse_recorded(text)
    if found is None:
        return ""
    seconds = int(((now or datetime.now(timezone.utc)) - found).total_seconds())
    if not 0 <= seconds < _RECENT:
        return show_local(text)[:16]
    if seconds < 60:
        return f"{seconds} s ago"
    if seconds < 3600:
        return f"{seconds // 60} min ago"
    if seconds < 86400:
        return f"{seconds // 3600} h ago"
    days = seconds // 86400
    return f"{days} day{'s' if days > 1 else ''} ago"


def show_duration(seconds: float) -> str:
    """Show a duration as text: 5 s, 3m 20s, 2h 05m, 1d 03h."""
    total = int(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60}m {total % 60:02}s"
    if total < 86400:
        return f"{total // 3600}h {total % 3600 // 60:02}m"
    return f"{total // 86400}d {total % 86400 // 3600:02}h"
