"""Write and read a job's events as lines of JSON, each with wall-clock and monotonic time."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

_MAX_LINE, _MAX_FILE = 1 << 20, 256 << 20  # maximum bytes to read
# Maximum characters of a text, and of an item in a list: nodes send lists of up to 256 long items.
_MAX_TEXT, _MAX_ITEM = 4000, 1000


def now() -> str:
    """Return the time as RFC 3339 in UTC, with milliseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class EventLog:
    """Append events to ``events.jsonl``.

    Only the coordinator writes the file; the other agents send their events to it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, event: str, **details: Any) -> str:
        """Append one event and return its time.

        Long texts are cut. An error such as a full disk loses the line and does not end the job.
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
        return [item[:_MAX_ITEM] if isinstance(item, str) else item for item in value]
    return value[:_MAX_TEXT] if isinstance(value, str) else value


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a job's complete events; yield none if the file cannot be read.

    Lines that are too long or are not events are skipped.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as stream:
            left = _MAX_FILE if stat.S_ISREG(os.fstat(stream.fileno()).st_mode) else 0
            while left > 0 and (line := stream.readline(_MAX_LINE)):
                left -= len(line)
                try:
                    event = json.loads(line.decode(errors="replace"))
                except (ValueError, RecursionError):
                    # The writer died before it finished its last line, or the line is too long.
                    continue
                if isinstance(event, dict):
                    yield event
    except OSError:
        return
