"""The job's story as lines of JSON: what happened, on which node, by the wall clock and by the
monotonic one.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

_LONGEST_LINE, _LARGEST_FILE = 1 << 20, 256 << 20  # bytes that are read
_LONGEST_TEXT, _LONGEST_ITEM = (
    4000,
    1000,
)  # characters of a text, and of one in a list: nodes send up to 256 long ones


def now() -> str:
    """Return the time as RFC 3339 in UTC, with milliseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class EventLog:
    """Appends to ``events.jsonl``. One process of a job writes it: the lead, which the other agents
    tell their part.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, event: str, **details: Any) -> str:
        """Append one event and return its time; long texts are cut. A full disk costs the line and
        not the job.
        """
        at = now()
        line = {"time": at, "monotonic": round(time.monotonic(), 6), "event": event}
        line |= {name: _cut(value) for name, value in details.items()}
        try:
            with self._path.open("a", encoding="utf-8", errors="replace") as stream:
                stream.write(json.dumps(line, ensure_ascii=False) + "\n")
        except OSError:
            pass
        return at


def _cut(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [item[:_LONGEST_ITEM] if isinstance(item, str) else item for item in value]
    return value[:_LONGEST_TEXT] if isinstance(value, str) else value


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events that were written whole; a job that has none yields none. A line that is too
    long or no event costs itself.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as stream:
            left = _LARGEST_FILE if stat.S_ISREG(os.fstat(stream.fileno()).st_mode) else 0
            while left > 0 and (line := stream.readline(_LONGEST_LINE)):
                left -= len(line)
                try:
                    event = json.loads(line.decode(errors="replace"))
                except (ValueError, RecursionError):
                    # The last line of a writer that died, or a part of one that is too long.
                    continue
                if isinstance(event, dict):
                    yield event
    except OSError:
        return
